"""The source under measurement: a server, one published table, and slots that see the same rows.

Rows have 8 columns and take about 160 bytes in a pgoutput message. Invariant: a load is
followed by one more row in a transaction of its own, so that a benchmark that reads up to
``WrittenRows.end_lsn`` sees at once that it was reached.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from demo.embedded_postgres import EmbeddedPostgres

PUBLICATION = "benchmark"

_TABLE = """
CREATE TABLE orders (
    id bigint PRIMARY KEY, quantity integer, amount numeric, status text, note text,
    created_at timestamptz, paid boolean, details jsonb)
"""
_ROWS = """
CREATE FUNCTION new_orders(first bigint, last bigint) RETURNS SETOF orders STABLE
BEGIN ATOMIC
    SELECT i,
           i % 100,
           round((i % 100000) / 100.0, 2),
           (ARRAY['new', 'packed', 'sent', 'returned'])[i % 4 + 1],
           'left with the neighbour at number ' || i % 131,
           timestamptz '2026-01-01 00:00:00.123456+00' + i * interval '1 second',
           i % 2 = 0,
           jsonb_build_object('sku', 'A-' || i % 977, 'count', i % 9)
      FROM generate_series(first, last) i;
END
"""
_FILL = "INSERT INTO orders SELECT * FROM new_orders(%s, %s)"
ONE_ROW = "INSERT INTO orders SELECT o.* FROM nextval('order_ids') i, new_orders(i, i) o"
TEN_ROWS = """
INSERT INTO orders SELECT o.*
  FROM (SELECT nextval('order_ids') i FROM generate_series(1, 10)) new, new_orders(i, i) o
""".replace("\n", " ")
_RESERVE = "SELECT setval('order_ids', currval('order_ids') + %s)"

# A checkpoint in the middle of one round and not of another would say nothing about either.
_SETTINGS = {"max_wal_size": "16GB", "checkpoint_timeout": "1h"}

_LET_GO_TIMEOUT_S, _LET_GO_POLL_S = 30.0, 0.05


@dataclass(frozen=True)
class WrittenRows:
    """Rows that were written; ``rows`` counts them without the one that follows."""

    rows: int
    end_lsn: str
    publication: str = PUBLICATION


class BenchmarkSource:
    """A connection to the server that makes rows and slots."""

    def __init__(self, postgres: EmbeddedPostgres) -> None:
        self.postgres = postgres
        self.connection = psycopg.connect(postgres.dsn, autocommit=True)
        self.connection.execute(_TABLE)
        self.connection.execute(_ROWS)
        self.connection.execute("CREATE SEQUENCE order_ids")
        self.connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE orders")
        self.written = 0

    def load(self, rows: int, transaction_rows: int) -> WrittenRows:
        """Write ``rows`` in transactions of ``transaction_rows``, and the one that follows."""
        first = self._number("SELECT nextval('order_ids')")
        self.connection.execute(_RESERVE, (rows,))
        for start in range(first, first + rows, transaction_rows):
            end = min(start + transaction_rows, first + rows) - 1
            self.connection.execute(_FILL, (start, end))
        self.written += rows + 1
        return self.ended(rows, ONE_ROW, PUBLICATION)

    def ended(self, rows: int, one_more: str, publication: str) -> WrittenRows:
        """The load that was just written, followed by one more row."""
        row = self.connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        self.run(one_more)
        return WrittenRows(rows, str(row[0]), publication)

    def run(self, statement: str) -> None:
        self.connection.execute(statement.encode())

    def checkpoint(self) -> None:
        """Write out what a load left behind, so that it does not happen while measuring."""
        self.connection.execute("CHECKPOINT")

    def create_slot(self, name: str) -> None:
        self.connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,)
        )

    def drop_slot(self, name: str) -> None:
        """Drop it as soon as the server has noticed that its reader is gone."""
        deadline = time.monotonic() + _LET_GO_TIMEOUT_S
        while True:
            try:
                self.connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
                return
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LET_GO_POLL_S)

    def has_slot(self, name: str) -> bool:
        return bool(
            self._number(
                # A slot without a position is being made: it lacks what is written meanwhile.
                "SELECT count(*) FROM pg_replication_slots"
                " WHERE slot_name = %s AND confirmed_flush_lsn IS NOT NULL",
                name,
            )
        )

    @contextmanager
    def slot_copy(self, original: str, name: str) -> Iterator[str]:
        """A slot that gives what ``original`` would give; dropped at the end."""
        self.connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (original, name))
        try:
            yield name
        finally:
            self.drop_slot(name)

    def delivered(self, name: str) -> int:
        """How many changes every consumer of the source ``name`` has, as the service says."""
        return self._number(
            "SELECT coalesce(min(delivered), 0) FROM walbrook.consumers WHERE source = %s", name
        )

    def is_fed(self, name: str) -> bool:
        """Whether the feed of the source ``name`` has brought something, as the service says."""
        query = "SELECT count(*) FROM walbrook.feeds WHERE source = %s AND plan IS NOT NULL"
        return bool(self._number(query, name))

    def count(self, table: str) -> int:
        """How many rows a table has."""
        return self._number(f"SELECT count(*) FROM {table}")  # noqa: S608

    def backend_pid(self) -> int:
        return self.connection.info.backend_pid

    def _number(self, query: str, *parameters: object) -> int:
        row = self.connection.execute(query.encode(), parameters).fetchone()
        assert row is not None
        return int(str(row[0]))


@contextmanager
def open_source(directory: Path) -> Iterator[BenchmarkSource]:
    """A new server with its table, with the default safety against a crash."""
    with EmbeddedPostgres(directory, settings=_SETTINGS) as postgres:
        source = BenchmarkSource(postgres)
        try:
            yield source
        finally:
            source.connection.close()
