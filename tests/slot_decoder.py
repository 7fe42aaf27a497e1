"""A slot that is read over SQL and decoded by ``walbrook.decode``: what a server really says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

import walbrook
from cdc.connection import with_options
from cdc.replication.stream import PINNED
from tests.fix_postgres import Database

# Slots belong to the server, and a server that was given is shared: named as the database.
_SLOT = "SELECT pg_create_logical_replication_slot(current_database(), 'pgoutput')"
_READ = """
SELECT data FROM pg_logical_slot_get_binary_changes(current_database(), NULL, NULL,
       'proto_version', '1', 'publication_names', 'everything', 'messages', 'true')
"""

Connection = psycopg.Connection[tuple[Any, ...]]


@contextmanager
def as_the_reader(database: Database) -> Iterator[Connection]:
    """A connection with the settings that the reader pins; only what is flushed can be read."""
    options = with_options(
        database.dsn, {**PINNED, "search_path": "public", "synchronous_commit": "on"}
    )
    with psycopg.connect(database.dsn, autocommit=True, options=options) as connection:
        yield connection


def open_slot(connection: Connection, publication: str = "FOR ALL TABLES") -> None:
    connection.execute(f"CREATE PUBLICATION everything {publication}".encode())
    connection.execute(_SLOT)


def read_messages(connection: Connection) -> list[bytes]:
    """What was committed since, as pgoutput wrote it."""
    return [data for (data,) in connection.execute(_READ, binary=True).fetchall()]


def read_slot(connection: Connection) -> walbrook.Decoded:
    """The same decoded, with the catalog's word on types that are not built in."""
    return walbrook.decode(read_messages(connection), catalog=walbrook.catalog_of(connection))


@dataclass
class SlotDecoder:
    """Executes SQL and decodes what it did; each ``decoded`` goes on where the last one ended."""

    connection: Connection
    decoder: walbrook.Decoder

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement.encode())

    def decoded(self) -> walbrook.Decoded:
        return self.decoder.decode(read_messages(self.connection))

    def changes(self) -> list[dict[str, Any]]:
        changes = self.decoded().changes
        changes.validate(full=True)
        found: list[dict[str, Any]] = changes.to_pylist()
        return found


@contextmanager
def slot_decoder(
    database: Database, *, publication: str = "FOR ALL TABLES"
) -> Iterator[SlotDecoder]:
    """A publication and a slot of ``database``."""
    with as_the_reader(database) as connection:
        open_slot(connection, publication)
        yield SlotDecoder(connection, walbrook.Decoder(walbrook.catalog_of(connection)))
