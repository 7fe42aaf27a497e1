"""How the source is reached: certificates, passwords, and connections that only look alive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.connection import connect
from cdc.errors import TransientError
from cdc.replication.control import SlotControl
from cdc.replication.stop import StopSignal
from cdc.replication.stream import ReplicationStream
from tests.certificates import Authority
from tests.fix_postgres import Database
from tests.proxy import Proxy
from tests.waiting import until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def slot(database: Database) -> str:
    name = f"slot_{database.name}"
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR TABLE item")
    database.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    return name


def ordinary(dsn: str, slot: str) -> None:
    SlotControl(dsn, slot, "pub").close()


def replication(dsn: str, slot: str) -> None:
    ReplicationStream(dsn, slot=slot, publication="pub", start_lsn=0).close()


@pytest.fixture(params=[ordinary, replication])
def open_one(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Each of the two kinds of connection to the source."""
    opener: Callable[[str, str], None] = request.param
    return opener


@pytest.fixture
def tls(database: Database, authority: Authority) -> Iterator[Proxy]:
    with Proxy(database.dsn, tls=authority.server_context("IP:127.0.0.1")) as proxy:
        yield proxy


def verified(proxy: Proxy, dsn: str, certificate: Path) -> str:
    return proxy.dsn(dsn, sslmode="verify-full", sslrootcert=str(certificate))


def test_a_certificate_of_the_authority_for_this_host_is_accepted(
    database: Database,
    slot: str,
    tls: Proxy,
    authority: Authority,
    open_one: Callable[[str, str], None],
) -> None:
    dsn = verified(tls, database.dsn, authority.certificate)
    open_one(dsn, slot)
    with connect(dsn, name="test") as connection:
        assert connection.pgconn.ssl_in_use


def test_a_certificate_for_another_host_is_refused(
    database: Database, slot: str, authority: Authority, open_one: Callable[[str, str], None]
) -> None:
    with Proxy(database.dsn, tls=authority.server_context("DNS:db.example.com")) as proxy:
        dsn = verified(proxy, database.dsn, authority.certificate)
        with pytest.raises(TransientError, match=r"does not match host name") as caught:
            open_one(dsn, slot)
    assert "db.example.com" in str(caught.value)


def test_a_certificate_of_an_unknown_authority_is_refused(
    database: Database,
    slot: str,
    tls: Proxy,
    tmp_path: Path,
    open_one: Callable[[str, str], None],
) -> None:
    stranger = Authority(tmp_path / "stranger")
    dsn = verified(tls, database.dsn, stranger.certificate)
    with pytest.raises(TransientError, match="certificate verify failed"):
        open_one(dsn, slot)


def test_a_server_without_tls_is_refused_when_verification_is_asked_for(
    database: Database, slot: str, authority: Authority, open_one: Callable[[str, str], None]
) -> None:
    with Proxy(database.dsn) as proxy:
        dsn = verified(proxy, database.dsn, authority.certificate)
        with pytest.raises(TransientError, match="does not support SSL"):
            open_one(dsn, slot)


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


def test_a_wrong_password_is_told_nowhere(
    database: Database,
    slot: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    open_one: Callable[[str, str], None],
) -> None:
    wrong = "hunter2-is-not-it"
    caplog.set_level(logging.DEBUG)
    with pytest.raises(TransientError, match="password authentication failed") as caught:
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
