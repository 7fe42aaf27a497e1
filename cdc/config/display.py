"""A configuration as YAML without its secrets, to be shown.

The output is a configuration file again: defaults filled in, paths absolute, secrets as ``***``.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel

from cdc.config.destination import RedisStreamDestination, WebhookDestination
from cdc.config.interpolate import escape
from cdc.config.model import Config
from cdc.config.postgres import PostgresServer
from cdc.config.secrets import SecretText, mask, mask_url
from cdc.config.sink import SinkConfig
from cdc.config.table import TableName

_IN_URL = {"hostname", "host", "port", "database", "username", "password"}


def show(config: Config) -> str:
    """The effective configuration without its secrets."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def plain(value: object) -> object:
    """A value of the configuration as YAML may have it, without its secrets."""
    if isinstance(value, BaseModel):
        return _section(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, SecretText):
        return escape(mask(value))
    if isinstance(value, TableName):
        return escape(value.written())
    return escape(str(value)) if isinstance(value, str | Path) else value


def _section(section: BaseModel) -> dict[str, object]:
    shown = {key: plain(value) for key, value in section if value is not None}
    if isinstance(section, PostgresServer | RedisStreamDestination) and section.url is not None:
        return {key: value for key, value in shown.items() if key not in _IN_URL}
    if isinstance(section, SinkConfig) and section.databases is not None:
        del shown["database"]
    if isinstance(section, WebhookDestination):
        shown["url"] = escape(mask_url(section.url))
    return shown
