"""Recorded pgoutput: what a real server sends for four kinds of load, as frames of the log.

Written once per run and read back by the process that is measured, so that neither the server nor
the recording is in its figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from cdc.api import catalog_of
from cdc.decoding.raw import RAW_SCHEMA, SCHEMAS_KEY, decode_schemas, encode_schemas
from cdc.replication.protocol import XLOG_HEADER_BYTES
from cdc.replication.stream import PINNED
from cdc.replication.wire.seal import Sealer

FRAME_ROWS = 16_384  # as the reader seals them
_SLOT, _PUBLICATION = "recording", "recording"
_ENVELOPE = bytes(XLOG_HEADER_BYTES)
_READ = """
SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,
       'proto_version', '1', 'publication_names', %s, 'messages', 'true')
"""

_ORDERS = """
CREATE TABLE orders (
    id bigint PRIMARY KEY, customer_id bigint, status text, amount numeric(12,2), paid boolean,
    created_at timestamptz, document jsonb, note text)
"""
_NEW_ORDERS = """
INSERT INTO orders
SELECT i, i * 7919 %% 100003, (ARRAY['new', 'packed', 'sent', 'returned'])[i %% 4 + 1],
       round((i %% 500000) / 100.0, 2), i %% 2 = 0,
       timestamptz '2026-01-01 00:00:00.123456+00' + i * interval '1.000001 seconds',
       jsonb_build_object('sku', 'A-' || i %% 977, 'count', i %% 9),
       'left at the door of number ' || i %% 131
  FROM generate_series(%(first)s::bigint, %(last)s) i
"""
_WIDE_TYPES = ("int", "bigint", "numeric(12,4)", "text", "boolean", "timestamptz", "date", "float8",
               "uuid", "varchar(40)")  # fmt: skip
_WIDE_VALUES = (
    "i %% 100000", "i * 1000003", "round(i / 7.0, 4)", "'value ' || i %% 1000", "i %% 3 = 0",
    "timestamptz '2026-01-01' + i * interval '1 second'", "date '2026-01-01' + (i %% 365)::int",
    "i / 3.0::float8", "md5(i::text)::uuid", "'short ' || i %% 10",
)  # fmt: skip
_DOCUMENTS = """
CREATE TABLE documents (
    id bigint PRIMARY KEY, kind text, body jsonb, settings json, labels text[], numbers int[])
"""
_NEW_DOCUMENTS = """
INSERT INTO documents
SELECT i, 'event',
       (SELECT jsonb_object_agg('key_' || k, jsonb_build_object(
                  'value', i * k, 'text', 'some "quoted" text ' || k, 'flag', k %% 2 = 0))
                      FROM generate_series(1, 12) k),
       '{"theme" : "dark",  "size": 12}', ARRAY['red', 'green', 'l' || i %% 50],
       ARRAY[i %% 10, i %% 100, i %% 1000]
  FROM generate_series(%(first)s::bigint, %(last)s) i
"""


@dataclass(frozen=True)
class RecordedLoad:
    """A table, what is done to it before the recording, and what is recorded."""

    table: str
    create: str
    before: tuple[str, ...]
    recorded: tuple[str, ...]
    rows: int  # that %(last)s stands for


def loads() -> dict[str, RecordedLoad]:
    """By name; ``rows`` are chosen so that each takes about as long."""
    wide = ", ".join(f"c{n} {_WIDE_TYPES[n % 10]}" for n in range(59))
    wide_values = ", ".join(_WIDE_VALUES[n % 10] for n in range(59))
    return {
        "orders": RecordedLoad("orders", _ORDERS, (), (_NEW_ORDERS,), 200_000),
        "wide": RecordedLoad(
            "wide",
            f"CREATE TABLE wide (id bigint PRIMARY KEY, {wide})",
            (),
            (
                f"INSERT INTO wide SELECT i, {wide_values} "  # noqa: S608
                "FROM generate_series(%(first)s::bigint, %(last)s) i",
            ),
            30_000,
        ),
        "updates": RecordedLoad(
            "orders",
            _ORDERS,
            ("ALTER TABLE orders REPLICA IDENTITY FULL", _NEW_ORDERS),
            (
                "UPDATE orders SET status = 'paid', amount = amount + 1 WHERE %(first)s > 0",
                "UPDATE orders SET note = NULL WHERE id %% 3 = 0 AND %(last)s > 0",
                "DELETE FROM orders WHERE id %% 5 = 0 AND id <= %(last)s AND %(first)s > 0",
            ),
            80_000,
        ),
        "documents": RecordedLoad("documents", _DOCUMENTS, (), (_NEW_DOCUMENTS,), 40_000),
    }


def record(dsn: str, load: RecordedLoad, path: Path) -> None:
    """Do what ``load`` says on the server at ``dsn``, and write what its slot gives to ``path``."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        # Only what is flushed can be read from a slot.
        for name, value in {**PINNED, "search_path": "public", "synchronous_commit": "on"}.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        _do(connection, load)
        messages = [
            _ENVELOPE + row[0]
            for row in connection.cursor(binary=True).execute(_READ, (_SLOT, _PUBLICATION))
        ]
        sealed = Sealer(catalog_of=catalog_of(connection)).seal(messages)
        connection.execute("SELECT pg_drop_replication_slot(%s)", (_SLOT,))
        connection.execute(f"DROP TABLE {load.table}; DROP PUBLICATION {_PUBLICATION}")
    assert sealed is not None
    schema = RAW_SCHEMA.with_metadata({SCHEMAS_KEY: encode_schemas(sealed.schemas)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for start in range(0, sealed.raw.num_rows, FRAME_ROWS):
            frame = sealed.raw.slice(start, FRAME_ROWS)
            writer.write_batch(frame.replace_schema_metadata(schema.metadata))


def _do(connection: psycopg.Connection[Any], load: RecordedLoad) -> None:
    bounds = {"first": 1, "last": load.rows}
    connection.execute(load.create.encode())
    for statement in load.before:
        connection.execute(statement.encode(), bounds if "%(" in statement else None)
    connection.execute(f"CREATE PUBLICATION {_PUBLICATION} FOR TABLE {load.table}".encode())
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (_SLOT,))
    for statement in load.recorded:
        connection.execute(statement.encode(), bounds)


def read_recording(path: Path) -> tuple[list[pa.RecordBatch], dict[int, bytes]]:
    """The frames and their schemas, in memory."""
    reader = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
    schemas = decode_schemas(reader.schema.metadata[SCHEMAS_KEY])
    return list(_frames(reader)), schemas


def _frames(reader: pa.ipc.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number).replace_schema_metadata(None)
