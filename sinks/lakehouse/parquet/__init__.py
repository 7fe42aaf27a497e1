"""Typed Parquet files with a manifest: a table is a folder whose manifest names its files.

``table`` is the one that ``sinks.lakehouse`` writes, ``manifest`` what its commits replace,
``places`` a folder on a disk or in an object store, ``library`` the client of stores, which is an
extra. ``sink`` adds what a history says of the rows that are there (``held``), and rewinds.
"""

from __future__ import annotations

from sinks.lakehouse.parquet.sink import TypedParquetSink
from sinks.lakehouse.parquet.table import parquet_tables

__all__ = ["TypedParquetSink", "parquet_tables"]
