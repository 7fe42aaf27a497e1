"""Packages that only some destinations need, by the extra that installs them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

from cdc.config.lakehouse import IcebergDestination
from cdc.config.parquet import ParquetDestination
from cdc.config.sink import SinkConfig
from cdc.errors import ConfigError

_MODULES: Final = {
    "delta": "deltalake",
    "iceberg": "pyiceberg",
    "kafka": "confluent_kafka",
    "parquet": "obstore",  # with a url
}
"""By the type of the destination."""

_EXTRAS: Final = {"delta": "lakehouse", "iceberg": "lakehouse", "parquet": "lakehouse"}
"""By the type of the destination, where the extra has another name."""

_OF_CATALOGS: Final = {"glue": ("boto3", "boto3"), "hive": ("thrift", "'pyiceberg[hive]'")}
"""By the type of an Iceberg catalog: the module, and what installs it."""


def missing_extra(kind: str) -> ConfigError:
    """The error that names the extra of a type of destination, and how it is installed."""
    return ConfigError(
        f"a sink of type {kind} needs the package {_MODULES[kind]}, which is not installed",
        fix=f"pip install 'walbrook[{_EXTRAS.get(kind, kind)}]'",
    )


def check_extras(sinks: Iterable[SinkConfig]) -> None:
    """Raise for the first sink whose destination needs a package that is not installed."""
    for sink in sinks:
        kind = sink.destination.type
        if isinstance(sink.destination, ParquetDestination) and sink.destination.url is None:
            continue
        if kind in _MODULES and find_spec(_MODULES[kind]) is None:
            raise missing_extra(kind)
        if isinstance(sink.destination, IcebergDestination):
            _check_catalog(sink.destination.catalog.type)


def _check_catalog(kind: str) -> None:
    module, installed_by = _OF_CATALOGS.get(kind, ("", ""))
    if module and find_spec(module) is None:
        raise ConfigError(
            f"catalog.type {kind} needs the package {module}, which is not installed",
            fix=f"pip install {installed_by}",
        )
