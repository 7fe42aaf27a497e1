"""How Postgres is reached: certificates, passwords, and connections that only look alive."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.connection import connect
from cdc.connection_pool import ConnectionPool
from cdc.errors import OperatorError, TransientError
from cdc.reach import reach
from cdc.replication.source.slot_control import SlotControl
from cdc.replication.stream import ReplicationStream
from cdc.stop import StopSignal
from tests.certificates import Authority
from tests.fix_postgres import Database
from tests.proxy import Proxy
from tests.slot_source import make_slot_source
from tests.waiting import until

REFUSED = (TransientError, OperatorError)
"""A start tells the operator; a running service tries again."""


def make_slot(database: Database) -> str:
    name = f"slot_{database.name}"
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR TABLE item")
    database.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    return name


@pytest.fixture
def slot(database: Database) -> str:
    return make_slot(database)


@pytest.fixture
def tls_slot(tls_database: Database) -> str:
    return make_slot(tls_database)


def ordinary(dsn: str, slot: str) -> None:
    SlotControl(dsn, slot, "pub").close()


def replication(dsn: str, slot: str) -> None:
    ReplicationStream(dsn, slot=slot, publication="pub", start_lsn=0).close()


def state(dsn: str, _slot: str) -> None:
    reach(dsn, "the state database").close()


@pytest.fixture(params=[ordinary, replication, state])
def open_one(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Each kind of connection: two to the source, and the one to the state database."""
    opener: Callable[[str, str], None] = request.param
    return opener


def test_a_certificate_of_the_authority_for_this_host_is_accepted(
    tls_database: Database, tls_slot: str, open_one: Callable[[str, str], None]
) -> None:
    open_one(tls_database.dsn, tls_slot)
    with connect(tls_database.dsn, name="test") as connection:
        assert connection.pgconn.ssl_in_use


def test_a_certificate_for_another_host_is_refused(
    tls_database: Database, tls_slot: str, open_one: Callable[[str, str], None]
) -> None:
    dsn = make_conninfo(tls_database.dsn, host="db.example.com", hostaddr="127.0.0.1")
    with pytest.raises(REFUSED, match=r"does not match host name") as caught:
        open_one(dsn, tls_slot)
    assert "db.example.com" in str(caught.value)


def test_a_certificate_of_an_unknown_authority_is_refused(
    tls_database: Database, tls_slot: str, tmp_path: Path, open_one: Callable[[str, str], None]
) -> None:
    stranger = Authority(tmp_path / "stranger")
    dsn = make_conninfo(tls_database.dsn, sslrootcert=str(stranger.certificate))
    with pytest.raises(REFUSED, match="certificate verify failed"):
        open_one(dsn, tls_slot)


def test_a_server_that_insists_on_tls_refuses_a_plain_connection(
    tls_database: Database, tls_slot: str, open_one: Callable[[str, str], None]
) -> None:
    dsn = make_conninfo(tls_database.dsn, sslmode="disable")
    with pytest.raises(REFUSED, match="no encryption"):
        open_one(dsn, tls_slot)


def test_a_server_without_tls_is_refused_when_verification_is_asked_for(
    database: Database, slot: str, tmp_path: Path, open_one: Callable[[str, str], None]
) -> None:
    authority = Authority(tmp_path / "authority")
    dsn = make_conninfo(database.dsn, sslmode="verify-full", sslrootcert=str(authority.certificate))
    with pytest.raises(REFUSED, match="does not support SSL"):
        open_one(dsn, slot)


def test_every_connection_of_a_reader_at_work_is_encrypted(
    tls_database: Database, tmp_path: Path
) -> None:
    tls_database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    shop = make_slot_source(tls_database, tmp_path / "log")
    with shop.reading():
        tls_database.execute("INSERT INTO item VALUES (1)")
        shop.until_logged(1)
        found = tls_database.execute(
            "SELECT a.application_name, s.ssl FROM pg_stat_activity a "
            "JOIN pg_stat_ssl s USING (pid) "
            f"WHERE a.application_name LIKE 'walbrook:%' AND a.datname = '{tls_database.name}'"
        )
    assert len(found) >= 3
    assert all(encrypted for _, encrypted in found)


def without_password(dsn: str) -> tuple[str, str]:
    parameters = conninfo_to_dict(dsn)
    password = str(parameters.pop("password"))
    return make_conninfo("", **parameters), password


def test_the_password_can_come_from_the_environment(
    database: Database,
    slot: str,
    monkeypatch: pytest.MonkeyPatch,
    open_one: Callable[[str, str], None],
) -> None:
    dsn, password = without_password(database.dsn)
    monkeypatch.setenv("PGPASSWORD", password)
    open_one(dsn, slot)


def test_the_password_can_come_from_a_password_file(
    database: Database,
    slot: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    open_one: Callable[[str, str], None],
) -> None:
    dsn, password = without_password(database.dsn)
    file = tmp_path / "passwords"
    file.write_text(f"*:*:*:*:{password}\n")
    file.chmod(0o600)
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", str(file))
    open_one(dsn, slot)


def test_a_wrong_password_is_reported_nowhere(
    database: Database,
    slot: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    open_one: Callable[[str, str], None],
) -> None:
    wrong = "hunter2-is-not-it"
    caplog.set_level(logging.DEBUG)
    with pytest.raises(REFUSED, match="password authentication failed") as caught:
        open_one(make_conninfo(database.dsn, password=wrong), slot)
    out, err = capfd.readouterr()
    told = [str(caught.value), repr(caught.value), str(caught.value.__cause__), out, err]
    assert not any(wrong in text for text in [*told, caplog.text])


def test_a_cut_connection_ends_the_stream_at_once(database: Database, slot: str) -> None:
    with (
        Proxy(database.dsn) as proxy,
        closing(
            ReplicationStream(proxy.dsn(database.dsn), slot=slot, publication="pub", start_lsn=0)
        ) as stream,
    ):
        silent = StopSignal()
        proxy.cut()

        def ended() -> bool:
            try:
                stream.drain([], bytes_max=1 << 20, rows_max=100)
                stream.wait(0.05, silent.descriptor)
            except TransientError:
                return True
            return False

        until("the cut to be noticed", ended, timeout_s=5)


def test_a_pool_keeps_no_connection_that_is_given_back_after_its_end(database: Database) -> None:
    pool = ConnectionPool(database.dsn, name="test")
    with pool.connection() as early:
        pass
    with pool.connection() as first, pool.connection() as late:
        assert first is early
        pool.end()
        assert not late.closed
    assert first.closed
    assert late.closed
