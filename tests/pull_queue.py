"""A pull consumer on a real state database, and claimers that say what they were handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from cdc.config import SinkConfig
from cdc.queue.pull_consumers import register_pulls
from cdc.state.consumers import Described
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from tests.fix_postgres import Database

SOURCE = "shop"

_PUT = """
INSERT INTO walbrook.pull_messages
       (consumer, commit_lsn, commit_idx, group_id, whole_table, bytes, commit_timestamp,
        table_schema, table_name, action, message)
SELECT c.id, '0/0'::pg_lsn + u.n, 0, u.g, u.w, 10, now(), 'public', u.t,
       CASE WHEN u.w THEN 'truncate' ELSE 'insert' END, json_build_object('n', u.n)
  FROM walbrook.consumers c,
       unnest(%(n)s::bigint[], %(g)s::bigint[], %(t)s::text[], %(w)s::boolean[]) u (n, g, t, w)
 WHERE c.name = %(consumer)s
"""
_STORED = """
UPDATE walbrook.pull_positions s SET commit_lsn = '0/0'::pg_lsn + %s::bigint, commit_idx = 0
  FROM walbrook.consumers c WHERE c.id = s.consumer AND c.name = %s
"""


def make_pull_consumer(database: Database, *names: str, **settings: Any) -> None:
    """Register pull consumers; ``settings`` are of the destination, some of the sink."""
    of_sink = {
        key: settings.pop(key) for key in ("max_deliveries", "retry", "shape") if key in settings
    }
    destination = {"type": "pull", **settings}
    sinks = [
        SinkConfig.model_validate(
            {"name": name, "database": SOURCE, "destination": destination, **of_sink}
        )
        for name in names
    ]
    with database.connect() as connection:
        migrate(connection)
        register_source(
            connection,
            name=SOURCE,
            slot="slot",
            publication="pub",
            system_identifier="1",
            slot_lsn=8,
            consumers=names,
            described={name: Described("pull") for name in names},
        )
        register_pulls(connection, SOURCE, sinks, hostname="h", database="d")


@dataclass(frozen=True)
class Message:
    """A message as a claimer has it; ``n`` is its place and what it says."""

    ack_id: str
    n: int
    deliveries: int
    action: str
    message: Any


class Puller:
    """One connection that stores, receives and acknowledges for one consumer."""

    def __init__(self, database: Database, consumer: str = "jobs") -> None:
        self.connection: psycopg.Connection[Any] = database.connect()
        self.consumer = consumer

    def put(
        self,
        first: int,
        groups: Sequence[int | None],
        *,
        table: str = "items",
        whole: Sequence[int] = (),
    ) -> None:
        """Store messages numbered from ``first`` on, of these groups; those in ``whole`` are of
        their whole table."""
        numbers = list(range(first, first + len(groups)))
        with self.connection.transaction():
            self.connection.execute(
                _PUT,
                {
                    "n": numbers,
                    "g": list(groups),
                    "t": [table] * len(numbers),
                    "w": [n in whole for n in numbers],
                    "consumer": self.consumer,
                },
            )
            self.connection.execute(_STORED, (numbers[-1], self.consumer))

    def receive(
        self,
        batch_size: int = 100,
        *,
        visibility: str | None = None,
        wait: str = "0",
        holder: str = "",
    ) -> list[Message]:
        rows = self.connection.execute(
            "SELECT ack_id, (commit_lsn - '0/0')::bigint, deliveries, action, message "
            "FROM walbrook.receive(%s, %s, %s::interval, %s::interval, %s)",
            (self.consumer, batch_size, visibility, wait, holder or None),
        ).fetchall()
        return [Message(*row) for row in rows]

    def ack(self, messages: Sequence[Message]) -> tuple[int, list[str]]:
        """How many are done, and which were refused."""
        return self._say("SELECT done, refused FROM walbrook.ack(%s, %s)", messages)

    def nack(
        self, messages: Sequence[Message], *, delay: str | None = None, error: str | None = None
    ) -> tuple[int, list[str]]:
        return self._say(
            "SELECT done, refused FROM walbrook.nack(%s, %s, %s::interval, %s)",
            messages,
            delay,
            error,
        )

    def extend(self, messages: Sequence[Message], by: str) -> tuple[int, list[str]]:
        return self._say("SELECT done, refused FROM walbrook.extend(%s, %s, %s)", messages, by)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query.encode()).fetchall()

    def close(self) -> None:
        self.connection.close()

    def _say(self, query: str, messages: Sequence[Message], *more: object) -> tuple[int, list[str]]:
        ack_ids = [message.ack_id for message in messages]
        row = self.connection.execute(query.encode(), (self.consumer, ack_ids, *more)).fetchone()
        assert row is not None
        return row[0], row[1]


def numbers(messages: Sequence[Message]) -> list[int]:
    return [message.n for message in messages]
