"""The core of Walbrook, in the order a change passes through it.

``replication`` reads the slot, ``log`` keeps what was read, ``decoding`` turns bytes into columns,
``state`` holds every position as rows in Postgres, ``service`` is what operators start. Nothing in
here imports Spark or a sink.

For your own programs: ``cdc.decode`` turns pgoutput messages into Arrow, ``cdc.Decoder`` a stream
of them, piece by piece.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdc.api import Decoded, Decoder, ValueFormat, catalog_of, decode

__all__ = ["Decoded", "Decoder", "ValueFormat", "catalog_of", "decode"]


def __getattr__(name: str) -> object:
    # Imported when it is asked for: every process of the service imports this package.
    if name in __all__:
        return getattr(import_module("cdc.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
