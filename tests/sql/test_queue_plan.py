"""Claims of what waits for push consumers go by the indexes, however much waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psycopg
import pytest

from cdc.queue.claims import _CLAIM, _DUE, _RELEASE, _TAKEN_OVER, BY_INDEX
from tests.fix_postgres import Database, on_both_versions
from tests.pull_queue import SOURCE, make_pull_consumer

pytestmark = [pytest.mark.migrated, on_both_versions]

ROWS = 50_000
# One in a thousand is the first of its group, and due; all others wait behind one.
FILL = f"""
INSERT INTO walbrook.events
       (consumer, commit_lsn, commit_idx, group_id, due_at, commit_timestamp, xid, table_schema,
        table_name, action, record, record_pks)
SELECT c.id, '0/0'::pg_lsn + n, 0, n %% {ROWS // 1000}, CASE WHEN n < {ROWS // 1000} THEN now() END,
       now(), 1, 'public', 't', 'insert', '{{}}', '["1"]'
  FROM walbrook.consumers c, generate_series(0, {ROWS - 1}) n
"""


def test_a_claim_and_a_look_read_only_what_they_take(database: Database) -> None:
    make_pull_consumer(database, "hook")
    with database.connect() as connection:
        connection.execute(FILL.replace("%%", "%").encode())
        ((number,),) = connection.execute("SELECT id FROM walbrook.consumers").fetchall()
        look = {"source": SOURCE, "consumer": None}
        for _ in range(2):  # without statistics, and with them
            assert f"events_{number}_consumer_due_at_idx" in _plan(connection, _DUE, look)
            claim = {
                "consumer": number, "term": 1, "holder": "h", "rows": 100, "bytes": 1 << 20,
                "behind": 2, "lease_s": 1.0,
            }  # fmt: skip
            for statement in (_RELEASE, _TAKEN_OVER):
                plan = _plan(connection, statement, (number, "h"))
                assert f"events_{number}_consumer_holder_idx" in plan
            plan = _plan(connection, _CLAIM, claim)
            assert f"events_{number}_consumer_due_at_idx" in plan
            assert f"events_{number}_consumer_group_id_commit_lsn_commit_idx_idx" in plan
            assert "Seq Scan on events" not in plan
            connection.execute("VACUUM ANALYZE walbrook.events")


def _plan(
    connection: psycopg.Connection[tuple[object, ...]],
    statement: str,
    values: Sequence[object] | Mapping[str, object],
) -> str:
    with connection.transaction():
        connection.execute(BY_INDEX)
        explain = f"EXPLAIN (COSTS OFF) {statement}".encode()
        rows = connection.execute(explain, values).fetchall()
    return "\n".join(str(row[0]) for row in rows)
