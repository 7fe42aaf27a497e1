"""A server whose transactions are streamed before they end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from cdc.replication.options import StreamOptions
from demo.embedded_postgres import EmbeddedPostgres
from tests.fix_postgres import (
    ON_VERSIONS,
    Database,
    embedded,
    fresh_database,
)
from tests.slot_source import SlotSource, make_slot_source
from tests.unit.replication.annotated import SET

# With this little memory a few hundred rows are streamed.
SETTINGS = {
    "logical_decoding_work_mem": "64kB",
    "max_prepared_transactions": "10",
    "max_replication_slots": "30",
}


@pytest.fixture(scope="module", params=ON_VERSIONS)
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-stream-"))
    try:
        with embedded(directory, request.param, fast=True, settings=SETTINGS) as running:
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def shop(server: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(server.dsn) as database:
        database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
        database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        yield database


def make_slot(database: Database, name: str) -> str:
    slot = f"{database.name}_{name}"
    database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    return slot


def fill(connection: psycopg.Connection[tuple[object, ...]], first: int, last: int) -> None:
    connection.execute(
        "INSERT INTO item SELECT i, repeat('x', 100) FROM generate_series(%s::int, %s::int) i",
        [first, last],
    )


def annotate(connection: psycopg.Connection[tuple[object, ...]], text: str) -> None:
    connection.execute("SELECT pg_logical_emit_message(true, %s, %s)", [SET, text])


@pytest.fixture
def source(server: EmbeddedPostgres, tmp_path: Path) -> Iterator[SlotSource]:
    """The same with the whole reader and its log."""
    with fresh_database(server.dsn) as database:
        database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
        yield make_slot_source(database, tmp_path / "log")


def spilled_bytes(source: SlotSource) -> int:
    folder = source.settings.log_directory / "spill"
    size = 0
    for path in folder.glob("*.rows"):
        with suppress(FileNotFoundError):  # the reader removes some meanwhile
            size += path.stat().st_size
    return size


def prepare(source: SlotSource, gid: str, first: int, last: int) -> None:
    with source.database.connect() as writer:
        writer.execute("BEGIN")
        fill(writer, first, last)
        writer.execute(f"PREPARE TRANSACTION '{gid}'")


STREAMED = StreamOptions(stream_transactions=True)

TWO_PHASE = StreamOptions(stream_transactions=True, two_phase=True)
