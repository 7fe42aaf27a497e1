"""Packages that only some destinations need, by the extra that installs them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

from cdc.config.sink import Sink
from cdc.errors import ConfigError

_MODULES: Final = {"kafka": "confluent_kafka"}
"""By the type of the destination, which is also the name of the extra."""


def missing_extra(extra: str) -> ConfigError:
    """The error that names the extra and how it is installed."""
    return ConfigError(
        f"a sink of type {extra} needs the package {_MODULES[extra]}, which is not installed",
        fix=f"pip install 'walbrook[{extra}]'",
    )


def check_extras(sinks: Iterable[Sink]) -> None:
    """Raise for the first sink whose destination needs a package that is not installed."""
    for sink in sinks:
        kind = sink.destination.type
        if kind in _MODULES and find_spec(_MODULES[kind]) is None:
            raise missing_extra(kind)
