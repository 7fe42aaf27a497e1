"""A postgres sink and its server: routes, connections, accounts, locks, partitions, many rows."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from cdc.change import ROUTE, MessageBatch
from cdc.errors import OperatorError, TransientError
from tests.conformance.messages import batch as plain_batch
from tests.conformance.postgres_sink import Open, as_gap, delivered
from tests.conformance.postgres_sink import opened as opened
from tests.fix_postgres import Database
from tests.fix_tls import TlsServer
from tests.slot_batches import SlotBatches
from tests.waiting import until


def test_routes_name_the_table(source: SlotBatches, there: Database, opened: Open) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT * FROM generate_series(1, 4)"
    )
    batch = source.taken()
    routes = pa.array(["here.odd", None, "here.odd", None], pa.string())
    sink = opened(table="{schema}_{table}", target_schema=None)
    delivered(sink, MessageBatch(batch.rows.append_column(ROUTE, routes), batch.shape))
    assert there.execute("SELECT * FROM here.odd ORDER BY id") == [(1,), (3,)]
    assert there.execute("SELECT * FROM public_t ORDER BY id") == [(2,), (4,)]


def test_a_connection_that_was_ended_is_opened_again(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    batch, sink = source.taken(), opened()
    delivered(sink, batch.slice(0, 1))
    there.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE application_name = 'walbrook:orders'"
    )
    cut_off = sink.deliver(batch)
    assert isinstance(cut_off.error, TransientError)
    delivered(sink, batch, absorbed=1)
    sink.close()
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'walbrook:orders'"
    until("its session to end", lambda: there.execute(sessions) == [(0,)])


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"password": "wr0ng"}, OperatorError),
        ({"dbname": "no_such_database"}, OperatorError),
        ({"host": "127.0.0.1", "port": "1"}, TransientError),
    ],
    ids=["password", "database", "port"],
)
def test_a_connection_that_is_refused_says_whether_it_is_worth_waiting(
    wrong: dict[str, str], kind: type[Exception], there: Database, opened: Open
) -> None:
    delivery = opened("events", dsn=make_conninfo(there.dsn, **wrong)).deliver(plain_batch(0, 3))
    assert type(delivery.error) is kind
    assert delivery.error is not None
    assert "wr0ng" not in delivery.error.full_text
    assert delivery.error.fix
    if kind is OperatorError:
        assert re.search("authentication failed for user|does not exist", delivery.error.what)


def test_an_account_without_the_privilege_is_for_an_operator(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    role = f"narrow_{there.name}"
    there.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
    try:
        delivery = opened(dsn=make_conninfo(there.dsn, user=role, password="p")).deliver(
            plain_batch(0, 3)
        )
        assert isinstance(delivery.error, OperatorError)
        assert "permission denied for database" in delivery.error.what
        assert "InsufficientPrivilege" in delivery.error.what
    finally:
        there.execute(f"DROP ROLE {role}")


@pytest.mark.sinks
def test_a_look_refuses_an_account_that_could_not_begin_and_gives_the_grant(
    there: Database, opened: Open
) -> None:
    role = f"narrow_{there.name}"
    there.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'p'; CREATE SCHEMA shop")
    try:
        sink = opened(
            "events", dsn=make_conninfo(there.dsn, user=role, password="p"), target_schema="shop"
        )
        for what, grant in {
            "has yet to make the schema of its positions": "GRANT CREATE ON DATABASE",
            "may not make tables in the schema shop": "GRANT USAGE, CREATE ON SCHEMA shop",
        }.items():
            with pytest.raises(OperatorError, match=what) as caught:
                sink.probe()
            assert caught.value.fix.startswith(grant)
            there.execute(caught.value.fix)
        assert "may create schemas" in sink.probe()
        delivered(sink, plain_batch(0, 3))
        there.execute(f"REVOKE CREATE ON DATABASE {there.name} FROM {role}")
        assert "may not create schemas" in sink.probe(), "all it needs is there"
    finally:
        sink.close()
        there.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_text_of_a_trigger_about_rights_is_not_shown(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    there.execute(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE FUNCTION refuse() RETURNS trigger "
        "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not for row %', NEW.id + 7000 "
        "USING ERRCODE = '42501'; END $$; CREATE TRIGGER refuse BEFORE INSERT ON t "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (83)")
    delivery = opened().deliver(source.taken())
    assert isinstance(delivery.error, OperatorError)
    assert "7083" not in str(delivery.error)
    assert "7083" in delivery.error.detail


@pytest.mark.sinks
def test_a_lock_that_is_held_too_long_is_waited_for_later(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    batch, sink = source.taken(), opened(statement_timeout_s=1.0)
    delivered(sink, batch.slice(0, 1))
    with there.connect() as holder, holder.transaction():
        holder.execute("LOCK TABLE t")
        held = sink.deliver(batch)
        assert isinstance(held.error, TransientError)
    delivered(sink, batch, absorbed=1)


@pytest.mark.sinks
def test_partitions_are_made_for_rows_and_ahead_and_dropped_by_age(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    sink = opened("events", partition_by="day", retention_days=30)
    delivered(sink, batch)
    today = datetime.now(UTC).date()
    names = (
        "SELECT inhrelid::regclass::text FROM pg_inherits "
        "WHERE inhparent = 'walbrook_events'::regclass ORDER BY 1"
    )
    ahead = [f"walbrook_events_p{today + timedelta(days=n):%Y%m%d}" for n in range(3)]
    assert [row[0] for row in there.execute(names)] == ahead
    there.execute(
        "CREATE TABLE walbrook_events_p20200101 PARTITION OF walbrook_events "
        "FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')"
    )
    delivered(opened("events"), batch, absorbed=1)
    assert ["walbrook_events_p20200101", *ahead] == [row[0] for row in there.execute(names)]
    delivered(opened("events", retention_days=30), batch, absorbed=1)
    assert ahead == [row[0] for row in there.execute(names)]


def test_a_gap_is_kept_where_the_readers_of_tables_find_it(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    batch = source.taken()
    delivered(opened(), as_gap(batch))
    cursor = batch.cursor(0)
    assert there.execute("SELECT consumer, commit_lsn - '0/0', gap FROM walbrook_sink.gaps") == [
        ("orders", cursor.lsn, {"id": 1})
    ]


@pytest.mark.sinks
def test_twenty_thousand_changes_of_a_thousand_rows_are_the_last_of_each(
    source: SlotBatches, database: Database, there: Database, opened: Open
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, n int, zażółć text)")
    source.run(
        "INSERT INTO t SELECT i % 1000, i, 'ęśćż 👩‍👩‍👧‍👦 ' || i FROM generate_series(1, 20000) i "
        "WHERE i <= 1000"
    )
    for n in range(19):
        source.run(f"UPDATE t SET n = n + {n}")
    delivered(opened(), source.taken())
    query = "SELECT * FROM t ORDER BY id"
    assert there.execute(query) == database.execute(query)


@pytest.mark.sinks
def test_a_batch_of_more_tables_than_are_kept_ready_arrives(
    source: SlotBatches, there: Database, opened: Open
) -> None:
    names = [f"t{n}" for n in range(70)]
    source.run("; ".join(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in names))
    sink = opened()
    for id in (1, 2):
        source.run("; ".join(f"INSERT INTO {name} VALUES ({id})" for name in names))
        delivered(sink, source.taken())
    query = " UNION ALL ".join(f"SELECT count(*) FROM {name}" for name in names)
    assert there.execute(query) == [(2,)] * 70


@pytest.mark.sinks
def test_a_destination_is_written_to_over_tls_that_is_verified(
    tls_server: TlsServer, tls_database: Database, opened: Open
) -> None:
    delivered(opened("events", dsn=tls_database.dsn), plain_batch(0, 20))
    assert tls_database.execute("SELECT count(*) FROM walbrook_events") == [(20,)]
    unknown = make_conninfo(tls_database.dsn, sslrootcert="system")
    refused = opened("events", dsn=unknown, consumer="other").deliver(plain_batch(0, 1))
    assert isinstance(refused.error, OperatorError)
