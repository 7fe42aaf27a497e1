"""A real Postgres that speaks TLS, with a certificate for ``localhost`` of an authority of its own.

The wheel's servers are built without TLS. The server is one that the system has installed, a build
that ``tests.postgres_builds`` has fetched, or can fetch now; if ``WALBROOK_TEST_POSTGRES_VERSION``
is set, a build of exactly that version. It refuses every connection without TLS.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from demo.embedded_postgres import EmbeddedPostgres
from demo.server_account import let_others_pass_to, server_account
from tests.certificates import Authority
from tests.fix_postgres import Database, find_installed, fresh_database
from tests.postgres_builds import NoBuildError, build_of, fetched

_ONLY_TLS = """\
hostssl all all 127.0.0.1/32 scram-sha-256
hostssl replication all 127.0.0.1/32 scram-sha-256
"""


@dataclass(frozen=True)
class TlsServer:
    """A server whose superuser we are; ``dsn`` verifies its certificate and its name."""

    dsn: str
    version: int  # major
    authority: Authority


@pytest.fixture(scope="session")
def tls_server() -> Iterator[TlsServer]:
    version, programs = _programs()
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-tls-"))
    with ExitStack() as running:
        running.callback(shutil.rmtree, directory, ignore_errors=True)
        let_others_pass_to(directory / "any")
        authority = Authority(directory / "authority")
        chain, key = authority.sign("DNS:localhost,IP:127.0.0.1")
        settings = {"ssl": "on", "ssl_cert_file": f"'{chain}'", "ssl_key_file": f"'{key}'"}
        account = server_account()
        if account is not None:
            shutil.chown(key, account, account)
            chain.parent.chmod(0o711)
        server = EmbeddedPostgres(
            directory / "server",
            fast=True,
            settings={"max_wal_senders": "30", "max_replication_slots": "30", **settings},
            installed=(version, programs),
        )
        running.enter_context(server)
        (server.directory / "data" / "pg_hba.conf").write_text(_ONLY_TLS)
        server.restart()
        dsn = make_conninfo(
            server.dsn,
            host="localhost",
            hostaddr="127.0.0.1",
            sslmode="verify-full",
            sslrootcert=str(authority.certificate),
        )
        yield TlsServer(dsn, server.version, authority)


@pytest.fixture
def tls_database(tls_server: TlsServer) -> Iterator[Database]:
    """An empty database on the server with TLS; its ``dsn`` verifies the server."""
    with fresh_database(tls_server.dsn) as made:
        yield made


def _programs() -> tuple[int, Path]:
    chosen = os.environ.get("WALBROOK_TEST_POSTGRES_VERSION")
    if chosen:
        return int(chosen), build_of(int(chosen))
    installed = find_installed()
    if installed is not None:
        return installed
    version = next(iter(fetched()), 18)
    try:
        return version, build_of(version)
    except NoBuildError as error:
        pytest.skip(f"no Postgres with TLS is installed, and none can be fetched: {error}")
