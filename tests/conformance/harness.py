"""One small harness a destination: open a sink on it, read back what it holds, take it away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, cast

import orjson
import psycopg
import pyarrow as pa
import pyarrow.dataset
import redis
from psycopg import sql

from cdc.change import ROUTE, MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.format import OLD_ROW_TEXT, ROW_TEXT, TABLE_VERSION
from cdc.decoding.row_texts import lines_of, version_text
from cdc.decoding.shapes import ShapeName
from cdc.queue.groups import BY_KEY
from cdc.queue.ledger.base import Ledger
from cdc.queue.ledger.open import LedgerAddress, open_ledger
from sinks.base import RequestSink, Sink
from sinks.file import FileSink
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from sinks.ledgered import LedgeredSink, LedgerPlace
from sinks.parquet import ParquetSink
from sinks.postgres import PostgresSink
from sinks.pull import PullSink, Queue
from sinks.redis_stream import RedisStreamSink
from sinks.webhook import WebhookSink
from tests.conformance.messages import CONSUMER, Held, Sample, batch, batch_of, expected, held
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.iceberg_lake import IcebergLake
from tests.lake import query
from tests.parquet_lake import ParquetLake
from tests.pgoutput import relation
from tests.pull_queue import SOURCE, make_pull_consumer


class Harness(Protocol):
    """A destination under test."""

    absorbs: bool  # whether it holds a replayed message once
    races: bool  # whether two that send a message at the same moment may both be taken

    def open(self) -> Sink: ...
    def held(self) -> list[Held]: ...
    def outage(self) -> AbstractContextManager[None]: ...
    def batch(self, start: int, end: int) -> MessageBatch: ...
    def batch_of(self, samples: Sequence[Sample]) -> MessageBatch: ...
    def expected(self, samples: Sequence[Sample], *, start: int = 0) -> list[Held]: ...


class Shaped:
    """The messages of the suite in the shape that the destination is handed."""

    shape: ShapeName = "sequin"
    races = False

    def batch(self, start: int, end: int) -> MessageBatch:
        return batch(start, end, self.shape)

    def batch_of(self, samples: Sequence[Sample]) -> MessageBatch:
        return batch_of(samples, shape=self.shape)

    def expected(self, samples: Sequence[Sample], *, start: int = 0) -> list[Held]:
        return expected(samples, start=start, shape=self.shape)


class FileHarness(Shaped):
    absorbs = True

    def __init__(self, directory: Path, shape: ShapeName = "sequin") -> None:
        self.directory = directory / "out"
        self.shape = shape

    def open(self) -> Sink:
        return FileSink(self.directory / "changes", consumer=CONSUMER, rotate_bytes=20_000)

    def held(self) -> list[Held]:
        files = sorted((self.directory / "changes").glob("changes-*.jsonl"))
        lines = [line for file in files for line in file.read_bytes().splitlines()]
        return [held(orjson.loads(line), self.shape) for line in lines]

    @contextmanager
    def outage(self) -> Iterator[None]:
        with _not_a_directory(self.directory):
            yield


class ParquetHarness(Shaped):
    absorbs = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "lake"

    def open(self) -> Sink:
        return ParquetSink(self.directory / "changes", consumer=CONSUMER)

    def held(self) -> list[Held]:
        root = self.directory / "changes"
        if not root.exists():
            return []
        # As a query engine reads it: every file that is not hidden, partitions from the path.
        rows = pyarrow.dataset.dataset(root, format="parquet", partitioning="hive").to_table()
        found = [
            Held(
                Cursor(row["commit_lsn"], row["commit_idx"]),
                row["action"],
                orjson.loads(row["record"]),
                orjson.loads(row["changes"]) if row["changes"] is not None else None,
            )
            for row in rows.to_pylist()
        ]
        return sorted(found, key=lambda one: one.cursor or ORIGIN)

    @contextmanager
    def outage(self) -> Iterator[None]:
        with _not_a_directory(self.directory):
            yield


_TEXT_OID = 25


class DeltaHarness(Shaped):
    """Histories of tables whose columns hold the record and the changes of a message as texts."""

    absorbs = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "lake"

    def open(self) -> Sink:
        tables = delta_tables(str(self.directory / "tables"), f"d/{CONSUMER}", {})
        return LakehouseSink(tables, LakeNames(), mode="append")

    def batch(self, start: int, end: int) -> MessageBatch:
        return with_texts(super().batch(start, end))

    def batch_of(self, samples: Sequence[Sample]) -> MessageBatch:
        return with_texts(super().batch_of(samples))

    def held(self) -> list[Held]:
        places = sorted((self.directory / "tables" / "public").glob("*"))
        return _held_in_histories(row for place in places for row in query(_HISTORY, t=place))

    @contextmanager
    def outage(self) -> Iterator[None]:
        with _not_a_directory(self.directory):
            yield


class IcebergHarness(DeltaHarness):
    """The same as Iceberg tables, whose catalog is elsewhere."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._lake = IcebergLake(directory / "lake")

    def open(self) -> Sink:
        return self._lake.sink()

    def held(self) -> list[Held]:
        names = [path.name for path in (self.directory / "public").glob("*")]
        return _held_in_histories(
            row
            for name in names
            for row in self._lake.rows(_HISTORY.replace("FROM t", f"FROM {name}"), name)
        )


class TypedParquetHarness(DeltaHarness):
    """The same as Parquet files with a manifest."""

    def open(self) -> Sink:
        return self._lake.sink()

    def held(self) -> list[Held]:
        places = (self.directory / "tables" / "public").glob("*")
        return _held_in_histories(
            row for place in places for row in self._lake.query(_HISTORY, f"public/{place.name}")
        )

    @property
    def _lake(self) -> ParquetLake:
        return ParquetLake(self.directory / "tables")


_HISTORY = "SELECT walbrook_lsn, walbrook_idx, walbrook_action, record, changes FROM t"


def _held_in_histories(rows: Iterable[tuple[object, ...]]) -> list[Held]:
    found = [
        Held(
            Cursor(int(str(lsn)), int(str(idx))),
            str(action),
            orjson.loads(str(record)),
            orjson.loads(str(changes)) if changes is not None else None,
        )
        for lsn, idx, action, record, changes in rows
    ]
    return sorted(found, key=lambda one: one.cursor or ORIGIN)


def with_texts(batch: MessageBatch) -> MessageBatch:
    """The batch with the texts of rows, as a sink with typed columns is handed them."""
    rows = batch.rows
    columns = [("record", _TEXT_OID), ("changes", _TEXT_OID)]
    versions = {
        name: version_text(relation(at + 1, "public", name, columns))
        for at, name in enumerate(("orders", "users"))
    }
    named = [versions[name] for name in rows.column("table_name").to_pylist()]
    texts = {
        ROW_TEXT: lines_of([rows.column("record"), rows.column("changes")], rows.num_rows),
        OLD_ROW_TEXT: pa.nulls(rows.num_rows, pa.string()),
        TABLE_VERSION: pa.array(named, pa.string()),
    }
    for name, column in texts.items():
        rows = rows.append_column(name, column)
    return MessageBatch(rows, batch.shape)


class RedisHarness(Shaped):
    absorbs = True

    def __init__(self, url: str, client: redis.Redis, shape: ShapeName = "sequin") -> None:
        self.url = url
        self.client = client
        self.shape = shape
        self.key = f"walbrook.{CONSUMER}"

    def open(self) -> Sink:
        return RedisStreamSink(
            consumer=CONSUMER, stream_key=self.key, batch_size=100, timeout_s=10, url=self.url
        )

    def held(self) -> list[Held]:
        return [_entry(entry_id, fields, self.shape) for entry_id, fields in self.entries()]

    def entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return self.entries_of(self.key)

    def entries_of(self, key: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return cast("list[tuple[bytes, dict[bytes, bytes]]]", self.client.xrange(key))

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.client.config_set("maxmemory", "1")
        try:
            yield
        finally:
            self.client.config_set("maxmemory", "0")


class PostgresHarness(Shaped):
    """Mode events, which takes messages of any table; the others are tested with real tables."""

    absorbs = True

    def __init__(self, database: Database) -> None:
        self.database = database

    def open(self) -> Sink:
        return PostgresSink(self.database.dsn, source="d", consumer=CONSUMER, mode="events")

    def held(self) -> list[Held]:
        if self.database.execute("SELECT to_regclass('walbrook_events')") == [(None,)]:
            return []
        rows = self.database.execute(
            "SELECT commit_lsn - '0/0', commit_idx, action, record, changes FROM walbrook_events "
            "ORDER BY id"
        )
        return [Held(Cursor(int(lsn), idx), *rest) for lsn, idx, *rest in rows]

    @contextmanager
    def outage(self) -> Iterator[None]:
        with _no_connections(self.database):
            yield


class PullHarness(Shaped):
    absorbs = True

    def __init__(self, database: Database, shape: ShapeName = "sequin") -> None:
        self.database = database
        self.shape = shape
        make_pull_consumer(database, CONSUMER)

    def open(self) -> Sink:
        return PullSink(Queue(self.database.dsn, SOURCE, BY_KEY), consumer=CONSUMER)

    def held(self) -> list[Held]:
        rows = self.database.execute(
            "SELECT message::text FROM walbrook.pull_messages ORDER BY commit_lsn, commit_idx"
        )
        return [held(orjson.loads(row[0]), self.shape) for row in rows]

    @contextmanager
    def outage(self) -> Iterator[None]:
        with _no_connections(self.database):
            yield


async def no_wait(_seconds: float) -> None:
    """Try again at once."""


class WebhookHarness(Shaped):
    absorbs = False

    def __init__(self, endpoint: Endpoint, shape: ShapeName = "sequin") -> None:
        self.endpoint = endpoint
        self.shape = shape

    def open(self) -> Sink:
        return WebhookSink(
            self.endpoint.url,
            consumer=CONSUMER,
            batch_size=100,
            timeout_s=10,
            max_retries=1,
            wait=no_wait,
        )

    def held(self) -> list[Held]:
        requests = self.endpoint.accepted
        return [held(message, self.shape) for each in requests for message in each.messages]

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.endpoint.stop()
        try:
            yield
        finally:
            self.endpoint.start()


class LedgeredHarness(WebhookHarness):
    """An endpoint behind a ledger, which takes the place of a memory of its own."""

    absorbs = True
    races = True

    def __init__(self, endpoint: Endpoint, address: LedgerAddress, name: str) -> None:
        super().__init__(endpoint)
        self.place = LedgerPlace(address, name)

    def open(self) -> Sink:
        return Ledgered(cast("RequestSink", super().open()), open_ledger(self.place.address), self)


class Ledgered(LedgeredSink):
    """One that closes what it was given."""

    def __init__(self, sink: RequestSink, ledger: Ledger, harness: LedgeredHarness) -> None:
        super().__init__(sink, ledger, harness.place)
        self._parts = (sink, ledger)

    def close(self) -> None:
        for part in self._parts:
            part.close()


ROUTES = (None, "orders", "users", "orders")
"""In turn, so that neighbours differ; the last two repeat a stream that was left."""


def routed(batch: MessageBatch, prefix: str = "") -> MessageBatch:
    """The batch with a route each, the same one for a message whenever it comes."""
    numbers = [int(orjson.loads(text)[0]) for text in batch.rows.column("record_pks").to_pylist()]
    found = [ROUTES[n // 3 % len(ROUTES)] for n in numbers]
    routes = pa.array([None if route is None else prefix + route for route in found], pa.string())
    return MessageBatch(batch.rows.append_column(ROUTE, routes), batch.shape)


class RoutedRedisHarness(RedisHarness):
    """Messages of one consumer in three streams, which together are the consumer's messages."""

    def batch(self, start: int, end: int) -> MessageBatch:
        return routed(super().batch(start, end))

    def batch_of(self, samples: Sequence[Sample]) -> MessageBatch:
        return routed(super().batch_of(samples))

    def entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found = [entry for key in (self.key, "orders", "users") for entry in self.entries_of(key)]
        return sorted(found, key=lambda entry: tuple(map(int, entry[0].split(b"-"))))


class RoutedWebhookHarness(WebhookHarness):
    """Messages of one consumer for three paths, in one order."""

    def batch(self, start: int, end: int) -> MessageBatch:
        return routed(super().batch(start, end), "/")

    def batch_of(self, samples: Sequence[Sample]) -> MessageBatch:
        return routed(super().batch_of(samples), "/")


_FIELDS: dict[ShapeName, list[bytes]] = {
    "sequin": [b"record", b"changes", b"action", b"metadata"],
    "debezium": [b"value", b"metadata"],
    "record": [b"record", b"action", b"metadata"],
}


def _entry(entry_id: bytes, fields: dict[bytes, bytes], shape: ShapeName) -> Held:
    assert list(fields) == _FIELDS[shape]
    lsn, _, idx = entry_id.decode().partition("-")
    metadata = orjson.loads(fields[b"metadata"])
    assert (metadata["commit_lsn"], metadata["commit_idx"]) == (int(lsn), int(idx))
    if shape != "sequin":
        return held(orjson.loads(fields[b"value" if shape == "debezium" else b"record"]), shape)
    return Held(
        Cursor(int(lsn), int(idx)),
        fields[b"action"].decode(),
        orjson.loads(fields[b"record"]),
        orjson.loads(fields[b"changes"]),
    )


@contextmanager
def _not_a_directory(path: Path) -> Iterator[None]:
    path.write_text("a file stands where the directory should be")
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def _no_connections(database: Database) -> Iterator[None]:
    with psycopg.connect(database.dsn, dbname="postgres", autocommit=True) as admin:
        name = sql.Identifier(database.name)
        admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        try:
            yield
        finally:
            admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
