"""A slot that is read over SQL and decoded by ``cdc.Decoder``: what a server really says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

import cdc
from cdc.replication.stream import PINNED
from tests.fix_postgres import Database

_READ = """
SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,
       'proto_version', '1', 'publication_names', 'decoded', 'messages', 'true')
"""


@dataclass
class SlotDecoder:
    """Executes SQL and decodes what it did; each ``decoded`` goes on where the last one ended."""

    connection: psycopg.Connection[tuple[Any, ...]]
    slot: str
    decoder: cdc.Decoder

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.connection.execute(statement.encode())

    def decoded(self) -> cdc.Decoded:
        rows = self.connection.cursor(binary=True).execute(_READ, [self.slot])
        return self.decoder.decode([data for (data,) in rows])

    def changes(self) -> list[dict[str, Any]]:
        changes = self.decoded().changes
        changes.validate(full=True)
        found: list[dict[str, Any]] = changes.to_pylist()
        return found


@contextmanager
def slot_decoder(
    database: Database,
    *,
    publication: str = "FOR ALL TABLES",
    form: cdc.ValueFormat | None = None,
) -> Iterator[SlotDecoder]:
    """A publication and a slot of ``database``, and a session with the reader's own settings."""
    with database.connect() as connection:
        # Only what is flushed can be read from a slot.
        for name, value in {**PINNED, "synchronous_commit": "on"}.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        connection.execute(f"CREATE PUBLICATION decoded {publication}".encode())
        slot = f"decoded_{database.name}"[:63]
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        decoder = cdc.Decoder(cdc.catalog_of(connection), form or cdc.ValueFormat())
        yield SlotDecoder(connection, slot, decoder)
