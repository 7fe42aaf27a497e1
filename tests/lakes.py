"""Lakes of every format and way, on a disk or in a store, and somebody else who writes beside."""

from __future__ import annotations

import threading
from abc import abstractmethod
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, cast

import orjson
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyiceberg.exceptions import CommitFailedException
from sqlalchemy.exc import DBAPIError

from cdc.errors import WalbrookError
from cdc.generation import Generation
from sinks.lakehouse import LakehouseSink, LakeNames, MaintenancePlan
from sinks.lakehouse.delta import delta_tables
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.sink import OpenTable
from tests.iceberg_lake import IcebergLake, Way
from tests.lake import query
from tests.parquet_lake import ParquetLake
from tests.stores import Store

LAKES = (
    "delta append", "delta copy_on_write", "iceberg append", "iceberg merge_on_read",
    "iceberg copy_on_write",
)  # fmt: skip
MERGED = tuple(name for name in LAKES if "append" not in name)
EVERY_LAKE = (*LAKES, "parquet append")


@dataclass(frozen=True)
class Lake:
    """Tables below ``root``, or in a store, as one consumer writes them; read by DuckDB.

    Of a lake in a store ``root`` has the copies that are read.
    """

    root: Path
    kind: Literal["delta", "iceberg", "parquet"]
    way: Way
    owner: str = "shop/orders"
    store: Store | None = None

    @classmethod
    def of(
        cls, root: Path, name: str, owner: str = "shop/orders", store: Store | None = None
    ) -> Self:
        """That of one of ``EVERY_LAKE``."""
        kind, way = name.split()
        return cls(root, cast("Any", kind), cast("Way", way), owner, store)

    @classmethod
    def read(cls, text: str) -> Self:
        """The lake that another process has described."""
        found = orjson.loads(text)
        store = None if found["store"] is None else Store(**found["store"])
        return cls(**{**found, "root": Path(found["root"]), "store": store})

    def describe(self) -> str:
        return orjson.dumps(asdict(self), default=str).decode()

    @property
    def is_merged(self) -> bool:
        return self.way != "append"

    @property
    def place(self) -> str:
        return str(self.root) if self.store is None else self.store.url

    @property
    def options(self) -> dict[str, str]:
        """Those of delta-rs and obstore."""
        return {} if self.store is None else dict(self.store.options)

    @property
    def iceberg(self) -> IcebergLake:
        return IcebergLake(self.root, self.store)

    @property
    def _parquet(self) -> ParquetLake:
        return ParquetLake(self.root, self.store)

    def tables(self) -> OpenTable:
        if self.kind == "iceberg":
            return self.iceberg.tables(self.owner)
        if self.kind == "parquet":
            return self._parquet.tables(owner=self.owner)
        return delta_tables(self.place, self.owner, self.options)

    def sink(self, plan: MaintenancePlan | None = None) -> LakehouseSink:
        if self.kind == "iceberg":
            return self.iceberg.sink(self.way, self.owner, plan)
        if self.kind == "parquet":
            return self._parquet.sink(owner=self.owner, maintenance=plan)
        mode: Literal["append", "upsert"] = "upsert" if self.is_merged else "append"
        return LakehouseSink(self.tables(), LakeNames(), mode=mode, maintenance=plan)

    def settings(self, **more: object) -> dict[str, object]:
        """The destination of a sink that writes this lake, which is on a disk."""
        found: dict[str, object] = {"type": self.kind, "path": str(self.root), "max_delay_ms": 0}
        if self.is_merged:
            found["mode"] = "upsert"
        if self.kind == "iceberg":
            found["catalog"] = {"uri": f"sqlite:///{self.root}.catalog.db", "name": "lake"}
        if self.way == "copy_on_write" and self.kind == "iceberg":
            found["merge"] = self.way
        return {**found, **more}

    def rows(self, sql: str, *names: str, generation: int = 1) -> list[tuple[object, ...]]:
        """The rows of a query over tables that are there; over one, if they are Parquet files."""
        names, of = names or ("t",), Generation(generation)
        if self.kind == "iceberg":
            namespace = "public" if generation == 1 else f"public_generation_{generation}"
            return self.iceberg.rows(sql, *names, namespace=namespace)
        if self.kind == "parquet":
            (name,) = names
            return self._parquet.query(sql, f"public/{name}", of, view=name)
        if self.store is not None:
            for name in names:
                (self.store / f"public/{name}").copied(self.root / "public" / name)
        root = Path(of.named(str(self.root)))
        return query(sql, **{name: root / "public" / name for name in names})

    def columns(self, name: str = "t") -> list[tuple[object, ...]]:
        """Names and types, as a reader sees them."""
        return [row[:2] for row in self.rows(f'DESCRIBE "{name}"', name)]

    def has(self, name: str) -> bool:
        return self.tables()(LakeTarget("public", name)).load() is not None

    def commits(self) -> int:
        """How many there are; less after somebody has removed old ones."""
        names = self.files("public")
        if self.kind == "parquet":
            return sum(name.endswith(".parquet") for name in names)
        return sum("_delta_log/" in each or "metadata/snap-" in each for each in names)

    def files(self, folder: str) -> list[str]:
        """The names of all files below a folder."""
        if self.store is not None:
            return (self.store / folder).names()
        below = self.root / folder
        return sorted(str(each.relative_to(below)) for each in below.rglob("*") if each.is_file())

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
            for name in sorted({each.split("/")[0] for each in self._lake.files("public")}):
                try:
                    self._write(name)
                except (DeltaError, OSError, CommitFailedException, DBAPIError, WalbrookError):
                    continue  # the sink was faster, or has not made the table yet

    @abstractmethod
    def _write(self, name: str) -> None: ...


class _DeltaStranger(Stranger):
    """OPTIMIZE and VACUUM, by delta-rs."""

    def _write(self, name: str) -> None:
        place = f"{self._lake.place}/public/{name}"
        table = DeltaTable(place, storage_options=self._lake.options)
        self.done += table.optimize.compact()["numFilesRemoved"] > 0
        table.vacuum(168, dry_run=False)


class _IcebergStranger(Stranger):
    """Snapshots and their expiry by pyiceberg, which cannot compact: all files become one."""

    def _write(self, name: str) -> None:
        table = self._lake.iceberg.table(name)
        if table is None:
            return
        table.append(pa.Table.from_pylist([], schema=table.schema().as_arrow()))
        opened = self._lake.tables()(LakeTarget("public", name))
        if opened.load() is not None and (files := opened.files()):
            rows = pa.concat_tables([opened.read(file) for file in files])
            opened.commit(opened.write(rows) if rows.num_rows else [], files, None)
            self.done += 1
        table.refresh().maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
