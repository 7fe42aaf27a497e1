"""Keys that a destination has and the table has not, found on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.backfill.table import PublishedTable
from cdc.config.table import TableName
from cdc.errors import TransientError
from cdc.verify.gone_rows import GoneTask, read_gone
from cdc.verify.held import rows_held
from tests.fix_postgres import DEFAULT_VERSION, Database

_TABLE = """
CREATE TYPE mood AS ENUM ('glad', 'sad');
CREATE TABLE item (id int PRIMARY KEY, other int NOT NULL, mood mood);
INSERT INTO item SELECT i, -i, 'glad' FROM generate_series(1, 10) AS i;
CREATE PUBLICATION pub FOR TABLE item
"""
_ALTERATIONS = [
    "ALTER TABLE item DROP CONSTRAINT item_pkey, ADD PRIMARY KEY (other)",
    pytest.param(
        "ALTER PUBLICATION pub SET TABLE item WHERE (id > 5)",
        marks=pytest.mark.skipif(DEFAULT_VERSION < 15, reason="row filters came with 15"),
    ),
]


def _task(database: Database, directory: Path) -> GoneTask:
    table = TableName("public", "item")
    return GoneTask(database.dsn, "shop", "pub", table, directory / "gone.arrow")


def _held(*keys: int) -> pa.RecordBatch:
    texts = pa.array([f'["{key}"]' for key in keys], pa.string())
    return rows_held(texts, texts)


def test_only_keys_that_the_table_lacks_are_deletes(database: Database, tmp_path: Path) -> None:
    database.execute(_TABLE)
    done = read_gone(_task(database, tmp_path), lambda _: iter([_held(3, 11, 12)]))
    assert done.rows == 2


@pytest.mark.parametrize("alteration", _ALTERATIONS)
def test_a_table_that_is_altered_while_its_keys_are_listed_is_read_again(
    database: Database, tmp_path: Path, alteration: str
) -> None:
    database.execute(_TABLE)

    def held(_: PublishedTable) -> Iterator[pa.RecordBatch]:
        database.execute(alteration)
        yield _held(3, 11)

    with pytest.raises(TransientError, match="was altered while its keys were listed"):
        read_gone(_task(database, tmp_path), held)
