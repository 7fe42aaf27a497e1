"""Decode: pgoutput bytes to Arrow columns to changes as JSON, whole columns at a time.

This room owns what a raw message means. Rows of the log enter (``raw``); the rows of one table
version and kind are walked column by column (``tuples``), each column becomes JSON by its type
(``types``), columns become objects (``objects``), and what an insert, update or delete says is
decided in ``rows``. ``shapes`` turns changes into the messages that consumers see. Nothing here
does I/O, and no step loops over rows except for values that only an exact slow path can read.
"""

from __future__ import annotations

from cdc.decoding.changes import decode_changes

__all__ = ["decode_changes"]
