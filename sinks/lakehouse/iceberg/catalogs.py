"""Catalogs that tell readers where the metadata of a table is, opened by their settings.

A catalog in a database is two tables of it. In the state database these lie in the schema
``walbrook``, which never enters the stream: a commit would otherwise be a change that is committed.

Invariants: a wait for a catalog in a database has a bound, and no connection outlives a commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from psycopg.conninfo import conninfo_to_dict

from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.disk import SyncedFiles
from sinks.lakehouse.iceberg.errors import telling
from sinks.lakehouse.iceberg.stores import StoreFileIO, account_in

_OF_STORES: Final = {
    "AWS_ENDPOINT_URL": "s3.endpoint",
    "AWS_REGION": "s3.region",
    "AWS_ACCESS_KEY_ID": "s3.access-key-id",
    "AWS_SECRET_ACCESS_KEY": "s3.secret-access-key",
    "AWS_SESSION_TOKEN": "s3.session-token",
    "AZURE_STORAGE_ACCOUNT_NAME": "adls.account-name",
    "AZURE_STORAGE_ACCOUNT_KEY": "adls.account-key",
}
"""Names that other tools have for options of stores, and those that the library has."""

_SCHEMA: Final = "walbrook"
_STATEMENT_TIMEOUT_MS: Final = 30_000
_CONNECT_TIMEOUT_S: Final = 10


@dataclass(frozen=True)
class Catalogs:
    """A catalog whose tables lie below ``root``; without a place it is in the state database."""

    name: str
    properties: Mapping[str, str] = field(repr=False)
    root: str
    storage_options: Mapping[str, str] = field(repr=False)
    state_dsn: str = field(default="", repr=False)

    def open(self) -> iceberg.Catalog:
        """Connect to it."""
        given = {_OF_STORES.get(key, key): value for key, value in self.storage_options.items()}
        files = StoreFileIO if "://" in self.root else SyncedFiles
        given["py-io-impl"] = f"{files.__module__}.{files.__qualname__}"
        if (account := account_in(self.root)) is not None:
            given.setdefault("adls.account-name", account)
        given |= self.properties
        if given["type"] == "sql":
            given["uri"] = _sql_url(given["uri"]) if "uri" in given else _state_url(self.state_dsn)
        with telling(self.root):
            if given["type"] != "sql":
                return iceberg.load_catalog(self.name, **given)
            try:
                catalog = iceberg.SqlCatalog(self.name, **given)
            except iceberg.DBAPIError:
                # Another process has made the catalog's own tables in the same moment, perhaps.
                catalog = iceberg.SqlCatalog(self.name, **given)
            catalog.engine.dispose()
            catalog.engine = iceberg.create_engine(given["uri"], poolclass=iceberg.NullPool)
            return catalog


def _sql_url(url: str) -> str:
    """A URL as SQLAlchemy takes it: Postgres is spoken to by psycopg."""
    for scheme in ("postgresql://", "postgres://"):
        if url.startswith(scheme):
            return f"postgresql+psycopg://{url.removeprefix(scheme)}"
    return url


def _state_url(dsn: str) -> str:
    found = {key: str(value) for key, value in conninfo_to_dict(dsn).items()}
    options = f"-c search_path={_SCHEMA} -c statement_timeout={_STATEMENT_TIMEOUT_MS}"
    found["options"] = f"{found.get('options', '')} {options}".strip()
    found.setdefault("connect_timeout", str(_CONNECT_TIMEOUT_S))
    # All of it as parameters: a host may be a folder, or several hosts.
    return iceberg.URL.create("postgresql+psycopg", query=found).render_as_string(
        hide_password=False
    )
