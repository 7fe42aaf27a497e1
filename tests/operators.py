"""Operators of a pipeline that is not running: SQL functions and what they left."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from cdc.connection import Connection
from cdc.state.consumers import Described
from cdc.state.migrate import migrate
from cdc.state.positions import register_source
from tests.fix_postgres import Database

_SOURCE = """
UPDATE walbrook.sources
   SET earliest_lsn = '0/100', earliest_idx = 0, log_lsn = '0/900', log_idx = 3;
UPDATE walbrook.consumers SET cursor_lsn = '0/500', cursor_idx = 0;
INSERT INTO walbrook.log_segments
       (source, first_batch, batches, rows, bytes, first_lsn, first_idx, high_lsn, high_idx,
        commit_from, commit_to, sealed_at, tier, location)
SELECT 'shop', s.batch, 1, 1, 1, s.first, s.first_idx, s.high, s.high_idx, s.first_at, s.last_at,
       now(), 'hot', ''
  FROM (VALUES
       (0, '0/100'::pg_lsn, 0, '0/200'::pg_lsn, 1, '2026-01-01 10:00Z'::timestamptz,
        '2026-01-01 11:00Z'::timestamptz),
       (1, '0/300', 2, '0/400', 1, '2026-01-01 11:30Z', '2026-01-01 12:00Z'),
       (2, '0/600', 0, '0/900', 3, '2026-01-01 13:00Z', '2026-01-01 14:00Z')
       ) AS s (batch, first, first_idx, high, high_idx, first_at, last_at);
"""

_WAITING = """
INSERT INTO walbrook.events
       (consumer, commit_lsn, commit_idx, group_id, whole_table, due_at, deliveries, error,
        commit_timestamp, xid, table_schema, table_name, action, record, record_pks)
SELECT c.id, %(lsn)s::pg_lsn, %(idx)s, %(group)s, %(whole)s, %(due)s::timestamptz, 3, 'refused',
       '2026-01-01', 7, 'public', 'item', 'insert', '{"id": 1, "n": 1.50}', '["1"]'
  FROM walbrook.consumers c WHERE c.name = %(consumer)s
"""

_LETTER = """
INSERT INTO walbrook.dead_letters
       (source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema, table_name,
        action, kind, error, payload, event, deliveries)
SELECT 'shop', %(consumer)s, %(lsn)s::pg_lsn, %(idx)s, '2026-01-01', 'public', 'item', 'insert',
       %(kind)s, 'it was refused', CASE WHEN %(event)s::json IS NULL THEN '\\x00'::bytea END,
       %(event)s::json, 3
RETURNING id
"""

WAYS = ("new_generation", "truncate")


class Operator:
    """A state database with a source, two webhooks, a file sink, and an operator's connection."""

    def __init__(self, database: Database, connection: Connection) -> None:
        self.database, self.connection = database, connection
        migrate(connection)
        kinds = {
            "hook": "webhook",
            "other": "webhook",
            "files": "file",
            "streams": "redis_stream",
            "once": "kafka_exactly_once",
            "topics": "kafka",
        }
        self.term = register_source(
            connection,
            name="shop",
            slot="slot",
            publication="pub",
            system_identifier="1",
            slot_lsn=0x100,
            consumers=list(kinds),
            described={
                name: Described(kind, rewind_ways=WAYS if kind != "webhook" else ())
                for name, kind in kinds.items()
            },
        )
        connection.execute(_SOURCE)

    def act(self, call: str) -> dict[str, Any]:
        rows = self.connection.cursor(row_factory=dict_row)
        (row,) = rows.execute(f"SELECT * FROM walbrook.{call}".encode()).fetchall()
        return row

    def refused(self, call: str) -> tuple[str, str]:
        """What a call says that is refused, and its hint."""
        with pytest.raises(psycopg.Error) as caught:
            self.act(call)
        return str(caught.value.diag.message_primary), str(caught.value.diag.message_hint)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query.encode()).fetchall()

    def waits(
        self,
        lsn: str,
        idx: int = 0,
        group: int | None = None,
        due: str | None = None,
        whole: bool = False,
        consumer: str = "hook",
    ) -> None:
        named = {"lsn": lsn, "idx": idx, "group": group, "due": due, "whole": whole}
        self.connection.execute(_WAITING, {**named, "consumer": consumer})

    def dies(self, lsn: str, idx: int = 0, consumer: str = "hook") -> int:
        """The message that waits at this cursor becomes a dead letter."""
        ((event,),) = self.rows(
            f"DELETE FROM walbrook.events e USING walbrook.consumers c WHERE c.id = e.consumer"
            f" AND c.name = '{consumer}' AND (commit_lsn, commit_idx) = ('{lsn}', {idx})"
            " RETURNING row_to_json(e)"
        )
        return self.letter(lsn, idx, "delivery", json.dumps(event), consumer)

    def letter(
        self, lsn: str, idx: int, kind: str, event: str | None = None, consumer: str = "hook"
    ) -> int:
        named = {"lsn": lsn, "idx": idx, "kind": kind, "event": event, "consumer": consumer}
        row = self.connection.execute(_LETTER, named).fetchone()
        assert row is not None
        return int(str(row[0]))

    def queue(self, consumer: str = "hook") -> list[tuple[str, int, bool]]:
        """The cursors that wait, and whether each is due."""
        return self.rows(
            "SELECT commit_lsn::text, commit_idx::int, coalesce(due_at <= clock_timestamp(), false)"
            "  FROM walbrook.events e JOIN walbrook.consumers c ON c.id = e.consumer"
            f" WHERE c.name = '{consumer}' ORDER BY commit_lsn, commit_idx"
        )

    def gaps(self) -> list[tuple[str, str, str]]:
        return self.rows(
            "SELECT consumer, from_lsn || ':' || from_idx, to_lsn || ':' || to_idx"
            "  FROM walbrook.gaps WHERE reason = 'discarded' AND reported_at IS NULL ORDER BY id"
        )
