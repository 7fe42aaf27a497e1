"""Lakes of every format and way, and somebody else who writes their tables beside the sink."""

from __future__ import annotations

import threading
from abc import abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self, cast

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyiceberg.exceptions import CommitFailedException
from sqlalchemy.exc import DBAPIError

from cdc.errors import WalbrookError
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.sink import OpenTable
from tests.iceberg_lake import IcebergLake, Way
from tests.lake import query

LAKES = (
    "delta append", "delta copy_on_write", "iceberg append", "iceberg merge_on_read",
    "iceberg copy_on_write",
)  # fmt: skip
MERGED = tuple(name for name in LAKES if "append" not in name)


@dataclass(frozen=True)
class Lake:
    """Tables below ``root`` as one consumer writes them; read by DuckDB."""

    root: Path
    kind: Literal["delta", "iceberg"]
    way: Way
    owner: str = "shop/orders"

    @classmethod
    def of(cls, root: Path, name: str, owner: str = "shop/orders") -> Self:
        """That of one of ``LAKES``."""
        kind, way = name.split()
        return cls(root, cast("Literal['delta', 'iceberg']", kind), cast("Way", way), owner)

    @property
    def is_merged(self) -> bool:
        return self.way != "append"

    @property
    def iceberg(self) -> IcebergLake:
        return IcebergLake(self.root)

    def tables(self) -> OpenTable:
        if self.kind == "iceberg":
            return self.iceberg.tables(self.owner)
        return delta_tables(str(self.root), self.owner, {})

    def sink(self) -> LakehouseSink:
        if self.kind == "iceberg":
            return self.iceberg.sink(self.way, self.owner)
        mode: Literal["append", "upsert"] = "upsert" if self.is_merged else "append"
        return LakehouseSink(self.tables(), LakeNames(), mode=mode)

    def rows(self, sql: str, *names: str) -> list[tuple[object, ...]]:
        """The rows of a query over tables that are there."""
        if self.kind == "iceberg":
            return self.iceberg.rows(sql, *names)
        return query(sql, **{name: self.root / "public" / name for name in names})

    def has(self, name: str) -> bool:
        return self.tables()(LakeTarget("public", name)).load() is not None

    def commits(self) -> int:
        """How many there are; less after somebody has removed old ones."""
        entry = "_delta_log/*.json" if self.kind == "delta" else "metadata/snap-*.avro"
        return len(list(self.root.glob(f"public/*/{entry}")))

    def stranger(self) -> Stranger:
        """Somebody else who compacts the tables, and removes what is old, all the time."""
        return _DeltaStranger(self) if self.kind == "delta" else _IcebergStranger(self)


class Stranger(threading.Thread):
    """Runs until the end of the ``with``; ``done`` counts its compactions."""

    def __init__(self, lake: Lake) -> None:
        super().__init__(daemon=True)
        self._lake, self._ended, self.done = lake, threading.Event(), 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(30)

    def run(self) -> None:
        while not self._ended.wait(0.05):
            for place in self._lake.root.glob("public/*"):
                try:
                    self._write(place)
                except (DeltaError, OSError, CommitFailedException, DBAPIError, WalbrookError):
                    continue  # the sink was faster, or has not made the table yet

    @abstractmethod
    def _write(self, place: Path) -> None: ...


class _DeltaStranger(Stranger):
    """OPTIMIZE and VACUUM, by delta-rs."""

    def _write(self, place: Path) -> None:
        table = DeltaTable(place)
        self.done += table.optimize.compact()["numFilesRemoved"] > 0
        table.vacuum(168, dry_run=False)


class _IcebergStranger(Stranger):
    """Snapshots and their expiry by pyiceberg, which cannot compact: all files become one."""

    def _write(self, place: Path) -> None:
        table = self._lake.iceberg.table(place.name)
        if table is None:
            return
        table.append(pa.Table.from_pylist([], schema=table.schema().as_arrow()))
        opened = self._lake.tables()(LakeTarget("public", place.name))
        if opened.load() is not None and (files := opened.files()):
            rows = pa.concat_tables([opened.read(file) for file in files])
            opened.commit(opened.write(rows) if rows.num_rows else [], files, None)
            self.done += 1
        table.refresh().maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
