"""Delta Lake by delta-rs: a table is a folder with Parquet files and a log of commits.

``table`` is the one that ``sinks.lakehouse`` writes, ``actions`` the words of the log for files,
``library`` the package that is an extra, ``maintenance`` what is done beside deliveries.
"""

from __future__ import annotations

from sinks.lakehouse.delta.table import DeltaLakeTable
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.sink import OpenTable


def delta_tables(root: str, owner: str, options: dict[str, str]) -> OpenTable:
    """Opens the tables below a folder or a URL, as the consumer ``owner`` writes them."""

    def open_table(target: LakeTarget) -> DeltaLakeTable:
        return DeltaLakeTable(f"{root}/{target.folder}", owner, options)

    return open_table
