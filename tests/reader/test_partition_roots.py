"""Which partitioned table a published table is a leaf of, as Postgres says."""

from __future__ import annotations

from cdc.replication.source.partition_roots import partition_roots
from tests.fix_postgres import Database

_TABLES = """
CREATE SCHEMA walbrook; CREATE TABLE walbrook.own (id int);
CREATE TABLE plain (id int PRIMARY KEY);
CREATE TABLE event (id int, day date) PARTITION BY RANGE (day);
CREATE TABLE event_2026 PARTITION OF event FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')
    PARTITION BY LIST (id);
CREATE TABLE event_2026_1 PARTITION OF event_2026 FOR VALUES IN (1);
CREATE TABLE event_rest PARTITION OF event DEFAULT;
CREATE PUBLICATION leaves FOR ALL TABLES;
CREATE PUBLICATION roots FOR ALL TABLES WITH (publish_via_partition_root = true);
"""


def test_leaves_belong_to_the_topmost_table_and_all_others_to_themselves(
    database: Database,
) -> None:
    database.execute(_TABLES)
    with database.connect() as connection:
        leaves = partition_roots(connection, "leaves")
        roots = partition_roots(connection, "roots")
    assert leaves == {
        "public.plain": "public.plain",
        "public.event_2026_1": "public.event",
        "public.event_rest": "public.event",
    }
    assert roots == {"public.plain": "public.plain", "public.event": "public.event"}
