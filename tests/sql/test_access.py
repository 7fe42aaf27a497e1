"""Rights in schema walbrook, with roles that log in: monitors, operators and pull workers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.fix_postgres import Database
from tests.pull_queue import Puller, make_pull_consumer

Connected = psycopg.Connection[tuple[Any, ...]]
Login = Callable[[str], Connected]

READABLE = (
    "cursors", "sources", "consumers", "health", "health_events", "gaps", "feeds", "pressure",
    "queues", "backlogs", "leases", "log_segments", "schema_versions", "watermarks",
)  # fmt: skip
LETTER = """
INSERT INTO walbrook.dead_letters
       (source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema, table_name,
        action, kind, error, payload)
VALUES ('shop', 'jobs', '0/1', 0, now(), 'public', 'item', 'insert', 'decode', 'value SECRET', '')
"""
OPEN_TO_ALL = """
SELECT p.oid::regprocedure::text
  FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
 WHERE p.pronamespace = 'walbrook'::regnamespace AND a.grantee = 0
"""


@pytest.fixture
def login(database: Database) -> Iterator[Login]:
    """Makes a role, grants it what the call says, and connects as it."""
    make_pull_consumer(database, "jobs", "others")
    for name in ("jobs", "others"):
        puller = Puller(database, name)
        puller.put(16, [1, 2])
        puller.close()
    database.execute(LETTER)
    roles: list[str] = []
    with ExitStack() as connections:

        def make(call: str) -> Connected:
            role = f"r_{secrets.token_hex(6)}"
            database.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
            roles.append(role)
            database.execute(f"SELECT walbrook.{call.format(role=role)}")
            dsn = make_conninfo(database.dsn, user=role, password=role)
            return connections.enter_context(psycopg.connect(dsn, autocommit=True))

        yield make
    with database.connect() as connection:
        for role in roles:
            dropped = sql.Identifier(role)
            connection.execute(sql.SQL("DROP OWNED BY {}").format(dropped))
            connection.execute(sql.SQL("DROP ROLE {}").format(dropped))


def refused(connection: Connected, *statements: str) -> None:
    for statement in statements:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement.encode())


VALUES = (
    "SELECT error FROM walbrook.dead_letters",
    "SELECT event FROM walbrook.dead_letters",
    "SELECT record FROM walbrook.events",
    "SELECT message FROM walbrook.pull_messages",
    "SELECT * FROM walbrook.receive('jobs')",
)
CHANGES = (
    "UPDATE walbrook.consumers SET cursor_lsn = '0/0'",
    "DELETE FROM walbrook.dead_letters",
    "INSERT INTO walbrook.gaps DEFAULT VALUES",
    "SELECT walbrook.make_queue(99)",
)
ACTS = ("SELECT walbrook.pause('jobs')", "SELECT walbrook.discard_all('jobs')")


def test_a_monitor_reads_every_view_and_changes_nothing(login: Login) -> None:
    monitor = login("grant_monitor('{role}')")
    for name in READABLE:
        monitor.execute(f"SELECT * FROM walbrook.{name}".encode())
    assert monitor.execute("SELECT kind FROM walbrook.dead_letters").fetchall() == [("decode",)]
    refused(monitor, *VALUES, *CHANGES, *ACTS)


def test_an_operator_acts_and_sees_row_values_only_if_that_is_granted(login: Login) -> None:
    operator = login("grant_operator('{role}')")
    for call in ("pause('jobs')", "resume('jobs')", "discard_all('jobs')"):
        operator.execute(f"SELECT walbrook.{call}".encode())
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState) as found:
        operator.execute("SELECT walbrook.redeliver(1, 'jobs')")
    assert "SECRET" not in str(found.value)
    operator.execute("SELECT walbrook.discard('jobs')")
    refused(operator, *VALUES, *CHANGES)
    trusted = login("grant_operator('{role}', with_values => true)")
    trusted.execute("SELECT error, event FROM walbrook.dead_letters")
    assert len(trusted.execute("SELECT message FROM walbrook.pull_messages").fetchall()) == 2
    refused(trusted, *CHANGES)


def test_an_operator_accepts_a_loss_and_skips(login: Login, database: Database) -> None:
    operator = login("grant_operator('{role}')")
    database.execute("UPDATE walbrook.consumers SET lost_at = now() WHERE name = 'jobs'")
    database.execute("UPDATE walbrook.sources SET log_lsn = '0/900', log_idx = 0")
    operator.execute("SELECT walbrook.accept_loss('jobs')")
    operator.execute("SELECT walbrook.skip_to('jobs', '0/900:0')")
    assert database.execute(
        "SELECT lost_at, cursor_lsn FROM walbrook.consumers WHERE name = 'jobs'"
    ) == [(None, "0/900")]


def test_an_operator_says_what_is_waited_for(login: Login, database: Database) -> None:
    database.execute("INSERT INTO walbrook.event_time (consumer, base_lsn) VALUES ('jobs', '0/3')")
    database.execute(
        "INSERT INTO walbrook.event_partitions (consumer, table_name)"
        " SELECT id, 'public.item' FROM walbrook.consumers WHERE name = 'jobs'"
    )
    operator = login("grant_operator('{role}')")
    acts = ("advance_watermark('jobs', '2026-01-01')", "set_partition_idle('jobs', 'public.item')")
    for act in acts:
        operator.execute(f"SELECT walbrook.{act}".encode())
    shown = "SELECT pushed_to IS NOT NULL, marked_idle FROM walbrook.watermarks"
    assert operator.execute(shown).fetchall() == [(True, True)]
    refused(login("grant_monitor('{role}')"), *(f"SELECT walbrook.{act}" for act in acts))


def test_a_rewind_is_an_act_of_an_operator(login: Login, database: Database) -> None:
    operator = login("grant_operator('{role}')")
    database.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/900' WHERE name = 'jobs'")
    row = operator.execute("SELECT * FROM walbrook.rewind('jobs', to_earliest => true)").fetchone()
    assert row is not None
    assert row[2] == "0/8:0"


def test_a_pull_worker_fetches_from_its_own_consumers_alone(login: Login) -> None:
    worker = login("grant_pull('{role}', 'jobs')")
    rows = worker.execute("SELECT ack_id FROM walbrook.receive('jobs', 10)").fetchall()
    assert len(rows) == 2
    ack_ids = [row[0] for row in rows]
    worker.execute("SELECT * FROM walbrook.nack('jobs', %s)", (ack_ids[:1],))
    worker.execute("SELECT * FROM walbrook.extend('jobs', %s, '1s')", (ack_ids[1:],))
    done = worker.execute("SELECT done FROM walbrook.ack('jobs', %s)", (ack_ids[1:],)).fetchone()
    assert done == (1,)
    refused(
        worker,
        "SELECT * FROM walbrook.receive('others')",
        "SELECT * FROM walbrook.ack('others', '{}')",
        "SELECT * FROM walbrook.nack('others', '{}')",
        "SELECT message FROM walbrook.pull_messages",
        "SELECT * FROM walbrook.cursors",
        *VALUES[:3], *CHANGES, *ACTS,
    )  # fmt: skip


def test_a_right_that_was_granted_can_be_revoked(login: Login, database: Database) -> None:
    role = login("grant_operator('{role}', with_values => true)")
    name = role.info.user
    database.execute(f"SELECT walbrook.grant_pull('{name}', 'jobs', 'others')")
    database.execute(f"SELECT walbrook.revoke_access('{name}')")
    refused(role, *VALUES, *CHANGES, *ACTS, "SELECT * FROM walbrook.cursors")


def test_no_function_is_open_to_every_role(login: Login, database: Database) -> None:
    assert database.execute(OPEN_TO_ALL) == []
