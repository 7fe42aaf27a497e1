"""All that other programs may rely on. ``cdc``, ``sinks`` and ``spark_pipeline`` are the inside.

Decode pgoutput: ``decode``, ``Decoder``, ``Decoded``, ``ValueFormat``, ``catalog_of``. The change
log in Spark: ``WalbrookDataSource``. Event time: ``EventTimeType``, ``register_event_time_type``.
A destination: ``Sink``, ``MessageBatch``, ``Delivery``. A position: ``Cursor``. Errors:
``WalbrookError`` and what is below it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cdc import version

if TYPE_CHECKING:
    from cdc.api import Decoded, Decoder, ValueFormat, catalog_of, decode
    from cdc.change import MessageBatch
    from cdc.cursor import Cursor
    from cdc.errors import (
        ConfigError,
        CorruptionError,
        DecodeError,
        GapError,
        OperatorError,
        PoisonError,
        ProtocolError,
        SourceError,
        TransientError,
        WalbrookError,
    )
    from cdc.eventtime.types import EventTimeType
    from cdc.eventtime.types import register as register_event_time_type
    from sinks.base import Delivery, Sink
    from spark_pipeline.source import WalbrookDataSource

__version__ = version.VERSION

_PLACES = {
    "cdc.api": ("Decoded", "Decoder", "ValueFormat", "catalog_of", "decode"),
    "cdc.change": ("MessageBatch",),
    "cdc.cursor": ("Cursor",),
    "cdc.errors": (
        "ConfigError",
        "CorruptionError",
        "DecodeError",
        "GapError",
        "OperatorError",
        "PoisonError",
        "ProtocolError",
        "SourceError",
        "TransientError",
        "WalbrookError",
    ),
    "cdc.eventtime.types": ("EventTimeType", "register_event_time_type"),
    "sinks.base": ("Delivery", "Sink"),
    "spark_pipeline.source": ("WalbrookDataSource",),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}
_INSIDE = {"register_event_time_type": "register"}

__all__ = [
    "ConfigError",
    "CorruptionError",
    "Cursor",
    "DecodeError",
    "Decoded",
    "Decoder",
    "Delivery",
    "EventTimeType",
    "GapError",
    "MessageBatch",
    "OperatorError",
    "PoisonError",
    "ProtocolError",
    "Sink",
    "SourceError",
    "TransientError",
    "ValueFormat",
    "WalbrookDataSource",
    "WalbrookError",
    "__version__",
    "catalog_of",
    "decode",
    "register_event_time_type",
]


def __getattr__(name: str) -> object:
    # Imported when it is asked for: Spark and Arrow are loaded by those who need them.
    if name in _PLACE_OF:
        return getattr(import_module(_PLACE_OF[name]), _INSIDE.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
