"""Reading a chunk: in this process and on an executor, and what a role must be allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pyspark.sql import SparkSession

from cdc.backfill.chunk_file import ChunkFile
from cdc.backfill.query import RowChoice
from cdc.backfill.ranges import BlockRange
from cdc.backfill.reading import (
    ChunkRead,
    ChunkTask,
    MovedTableError,
    connect_to_read,
    copy_texts,
    list_open,
    read_chunk,
    read_chunk_apart,
)
from cdc.backfill.table import describe_table
from cdc.config.table import TableName
from cdc.errors import TransientError
from tests.backfill_rig import Rig
from tests.fix_postgres import Database

pytestmark = pytest.mark.migrated

_ITEM = TableName("public", "item")
_TABLE = """
CREATE TYPE mood AS ENUM ('calm');
CREATE TABLE item (id int PRIMARY KEY, mood mood, note varchar(40), price numeric(10,2));
INSERT INTO item SELECT i, 'calm', 'n' || i, i FROM generate_series(1, 5000) AS i;
CREATE PUBLICATION pub FOR TABLE item
"""


def _task(database: Database, path: Path) -> ChunkTask:
    with connect_to_read(database.dsn, "test") as connection:
        (leaf,) = describe_table(connection, "pub", _ITEM).leaves
    return ChunkTask(
        database.dsn, "shop", "pub", _ITEM, leaf.name, leaf.oid, leaf.filenode,
        RowChoice(BlockRange(0, None)), path,
    )  # fmt: skip


def test_an_executor_reads_what_the_driver_reads(
    database: Database, tmp_path: Path, spark: SparkSession
) -> None:
    database.execute(_TABLE)
    task = _task(database, tmp_path / "driver")
    here = read_chunk(task)
    there = replace(task, path=tmp_path / "executor")
    (read,) = spark.sparkContext.parallelize([there], 1).map(read_chunk_apart).collect()
    assert isinstance(read, ChunkRead)
    assert (read.rows, read.bytes) == (here.rows, here.bytes)
    assert here.rows == 5000
    one, other = (ChunkFile(path).rows(0, 5000) for path in (task.path, there.path))
    assert one.column("payload").equals(other.column("payload"))
    gone = replace(there, leaf=TableName("public", "nothing"))
    (error,) = spark.sparkContext.parallelize([gone], 1).map(read_chunk_apart).collect()
    assert isinstance(error, MovedTableError)


def test_the_rows_of_a_file_are_found_wherever_a_piece_begins(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.backfill.reading._PIECE_BYTES", 1000)
    database.execute(_TABLE)
    task = _task(database, tmp_path / "chunk")
    read_chunk(task)
    with pa.memory_map(str(task.path)) as file:
        assert pa.ipc.open_file(file).num_record_batches > 10
    rows = ChunkFile(task.path)
    whole = rows.rows(0, 5000)
    for start, count in ((0, 1), (17, 400), (4999, 1), (2500, 2500)):
        assert rows.rows(start, count).equals(whole.slice(start, count))


def test_a_chunk_that_takes_too_long_says_so(database: Database, tmp_path: Path) -> None:
    database.execute(_TABLE)
    task = _task(database, tmp_path / "chunk")
    slow = replace(task.choice, where="pg_sleep(0.01) IS NOT NULL")
    with pytest.raises(TransientError) as raised:
        read_chunk(replace(task, choice=slow, statement_s=1))
    assert raised.value.kind == "chunk_timeout"


def test_a_connection_can_be_used_after_a_copy_that_was_not_read_to_its_end(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.backfill.reading._PIECE_BYTES", 1000)
    numbers = sql.SQL("COPY (SELECT i FROM generate_series(1, 1000000) i) TO STDOUT")
    fails = sql.SQL("COPY (SELECT 1 / (i - 5000) FROM generate_series(1, 9999) i) TO STDOUT")
    with connect_to_read(database.dsn, "test") as connection:
        texts = copy_texts(connection, sql.Composed([numbers]))
        assert next(texts).startswith(b"1\n2\n3\n")
        texts.close()
        assert connection.execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(psycopg.errors.DivisionByZero):
            list(copy_texts(connection, sql.Composed([fails])))
        assert connection.execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(psycopg.errors.UndefinedTable):
            list(copy_texts(connection, sql.Composed([sql.SQL("COPY nothing TO STDOUT")])))
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_open_transactions_are_listed_with_an_lsn_from_before(database: Database) -> None:
    with database.connect() as writer, connect_to_read(database.dsn, "test") as connection:
        before = list_open(connection)
        with writer.transaction():
            row = writer.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
            assert row is not None
            during = list_open(connection)
        after = list_open(connection)
    assert row[0] in during.xids
    assert row[0] not in before.xids | after.xids
    assert before.lsn <= during.lsn <= after.lsn


def test_a_role_that_may_write_nothing_reads_and_the_table_is_described_as_changes_do(
    database: Database, tmp_path: Path
) -> None:
    database.execute(_TABLE.replace("CREATE PUBLICATION pub FOR TABLE item", "SELECT 1"))
    rig = Rig(database, tmp_path)
    rig.read_as = make_conninfo(database.dsn, options="-c default_transaction_read_only=on")
    with rig.running():
        rig.backfilled("item")
        database.execute("UPDATE item SET note = note WHERE id = 1")
        rig.until_delivered()
    with connect_to_read(database.dsn, "test") as connection:
        message = describe_table(connection, "pub", _ITEM).message
    view = rig.source.view
    logged = {
        schema
        for frame in view.frames(view.first_batch(), view.next_batch())
        for schema in frame.schemas.values()
    }
    assert logged == {message}
    assert len(rig.messages()) == 5001
