"""Iceberg tables (format version 2) by the library pyiceberg and manifests of our own.

``table`` is the one that ``sinks.lakehouse`` writes: ``manifests`` writes the metadata of a commit,
``encoding`` its files, ``schema`` says which column has which number, ``position`` how far a table
has come. ``merging`` is the mode that deletes by key, ``reading`` applies such deletes, ``upkeep``
ends old versions. ``catalogs`` is where tables are named, ``disk`` and ``stores`` are where they
lie. ``library`` is the package, which is an extra.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.catalogs import Catalogs
from sinks.lakehouse.iceberg.disk import location_of
from sinks.lakehouse.iceberg.merging import MergesOnRead
from sinks.lakehouse.iceberg.table import IcebergTable
from sinks.lakehouse.names import GAPS, LakeTarget
from sinks.lakehouse.sink import OpenTable
from sinks.lakehouse.table import LakeTable

__all__ = ["Catalogs", "MergesOnRead", "iceberg_tables"]


def iceberg_tables(
    connect: Callable[[], iceberg.Catalog], root: str, owner: str, generation: int = 1
) -> OpenTable:
    """Opens the tables of a catalog, whose files lie below a folder or a URL.

    The catalog is connected to when the first table is looked at. Tables of a later generation have
    a namespace of their own, and so have those that each consumer keeps for itself.
    """
    own = owner.rpartition("/")[2]
    opened: list[iceberg.Catalog] = []
    lock = threading.Lock()
    place = root if "://" in root else location_of(Path(root))

    def catalog() -> iceberg.Catalog:
        with lock:
            if not opened:
                opened.append(connect())
            return opened[0]

    def open_table(target: LakeTarget) -> LakeTable:
        if target.schema.startswith(GAPS.schema):
            target = LakeTarget(f"{target.schema}_{own}", target.name)
        namespace, name = (part.replace(".", "~2E") for part in target.folder.split("/"))
        if generation > 1:
            namespace = f"{namespace}_generation_{generation}"
        return IcebergTable(catalog, (namespace, name), f"{place}/{namespace}/{name}", owner)

    return open_table
