"""The claims use the indexes: what waits, and what is gone but not vacuumed, costs them nothing."""

from __future__ import annotations

import re

import pytest

from tests.fix_postgres import Database, on_both_versions
from tests.pull_queue import Puller, make_pull_consumer, numbers
from tests.queue_plans import explain, statement_of

pytestmark = [pytest.mark.migrated, on_both_versions]

FORCED = ("seqscan", "bitmapscan", "hashjoin", "mergejoin")
PLACE = ("'0/1'::pg_lsn", "0")
TIMES = ("'-infinity'::timestamptz", "now()")


def index_conditions(plan: str) -> list[str]:
    return re.findall(r"Index Cond: (.*)", plan)


@pytest.fixture
def puller(database: Database) -> Puller:
    make_pull_consumer(database, "jobs")
    puller = Puller(database)
    for first in range(1, 20_001, 5_000):
        puller.put(first, range(first, first + 5_000))
    return puller


def test_claims_and_acknowledgements_go_by_the_indexes_with_statistics_and_without(
    puller: Puller,
) -> None:
    for _ in range(2):
        _check_plans(puller)
        puller.ack(puller.receive(1000))
        puller.receive(1000)
        puller.connection.execute("VACUUM ANALYZE")
    puller.close()


def _check_plans(puller: Puller) -> None:
    for setting in FORCED:
        puller.connection.execute(f"SET enable_{setting} = off".encode())
    connection = puller.connection
    ((number,),) = puller.rows("SELECT id FROM walbrook.consumers WHERE name = 'jobs'")

    look = statement_of(connection, "claim", number, "are_free")
    plan = explain(connection, look, [*PLACE, "7::bigint", "100", *TIMES])
    assert f"using pull_messages_{number}_pkey" in plan
    assert any("ROW(commit_lsn, commit_idx) >" in each for each in index_conditions(plan))
    assert any("group_id = n.group_id" in each for each in index_conditions(plan))
    assert any("due_at <=" in each for each in index_conditions(plan))
    assert any("lease_until >" in each for each in index_conditions(plan))
    _no_scan_of_everything(plan)

    take = statement_of(connection, "claim", number, "fresh AS MATERIALIZED")
    until = "clock_timestamp() + interval '30 s'"
    values = [*PLACE, "'0/64'::pg_lsn", "0", "7::bigint", until, "NULL::text"]
    _no_scan_of_everything(explain(connection, take, values))

    hold = statement_of(connection, "ack", number, "read_ack_ids")
    plan = explain(connection, hold, [f"ARRAY['{number}-1-0/5-0']"])
    assert "commit_lsn = g.commit_lsn" in plan
    _no_scan_of_everything(plan)
    ack = statement_of(connection, "ack", number, "gone AS")
    plan = explain(
        connection, ack, ["ARRAY['(0,1)'::tid]", "ARRAY['0/5'::pg_lsn]", "ARRAY[0::bigint]"]
    )
    assert "TID Cond: " in plan
    assert "commit_lsn = m.commit_lsn" in plan
    _no_scan_of_everything(plan)

    passing = statement_of(connection, "claim_fresh", number, "is_behind")
    values = [*PLACE, "100", "100", "7::bigint", "clock_timestamp()", until, "NULL::text"]
    values += ["'-infinity'::timestamptz", "clock_timestamp()", "0", "0"]
    plan = explain(connection, passing, values)
    assert any("group_id = f.group_id" in each for each in index_conditions(plan))
    assert f"using pull_messages_{number}_pkey" in plan

    again = statement_of(connection, "claim_again", number, "followers AS")
    plan = explain(connection, again, [*TIMES, "100", "100", "20"])
    conditions = index_conditions(plan)
    assert any("due_at <=" in each for each in conditions)
    assert any("lease_until >" in each for each in conditions)
    assert any("group_id = " in each for each in conditions)
    for setting in FORCED:
        connection.execute(f"RESET enable_{setting}".encode())


def _no_scan_of_everything(plan: str) -> None:
    """Neither the messages nor what is in flight is gone through as a whole."""
    assert "Seq Scan" not in plan, plan
    scans = re.findall(r"using (\w+) on .*\n *Index Cond: (.*)", plan)
    assert scans
    for index, condition in scans:
        # That one is partial: most often there is nothing in it.
        if not index.endswith("table_schema_table_name_idx"):
            assert re.fullmatch(r"\(consumer = \d+\)", condition) is None, plan


def test_a_claim_reads_as_little_before_a_long_backlog_as_behind_many_that_are_gone(
    puller: Puller,
) -> None:
    puller.connection.execute(
        "ALTER TABLE walbrook.pull_in_flight_1 SET (autovacuum_enabled = off)"
    )
    puller.connection.execute("ALTER TABLE walbrook.pull_messages_1 SET (autovacuum_enabled = off)")

    def read() -> int:
        rows = puller.connection.execute(
            "EXPLAIN (ANALYZE, BUFFERS) SELECT * FROM walbrook.receive('jobs', 100)"
        ).fetchall()
        text = "\n".join(row[0] for row in rows)
        return sum(map(int, re.findall(r"shared hit=(\d+)", text)[:1]))

    read()
    first = read()
    for _ in range(60):
        held = puller.receive(100)
        assert len(held) == 100
        puller.ack(held)
    assert read() < 2 * first
    assert numbers(puller.receive(1)) == [60 * 100 + 301]
    puller.close()
