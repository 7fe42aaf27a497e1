"""A real Postgres with ``wal_level = logical`` for the tests.

The server is, in this order: the one at ``WALBROOK_TEST_POSTGRES_URL``, a container if a Docker
engine answers, or one of our own: 16 and 18 from the embedded wheel, 14, 15 and 17 from
``tests.postgres_builds``. Every test that asks for ``database`` gets an empty one of its own, or
one with the state schema if it is marked ``migrated``. One that is marked ``on_both_versions`` runs
on 18, and on 16 with ``make test-sinks``. ``WALBROOK_TEST_POSTGRES_VERSION`` picks one major
version for all of them. Extensions that the wheel's servers lack are tested on a server that the
system has installed, if it has one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import psycopg
import pytest
from _pytest.mark import ParameterSet
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.state.migrate import migrate
from demo.embedded_postgres import EmbeddedPostgres, Version, find_postgres
from tests.postgres_builds import RELEASES, build_of
from tests.waiting import held_now

DOCKER_TIMEOUT_S = 3


@dataclass(frozen=True)
class PostgresServer:
    """A server whose superuser we are."""

    dsn: str
    version: int  # major
    restart: Callable[[], None] | None  # only for the embedded server


@dataclass(frozen=True)
class Database:
    """An empty database of one test."""

    name: str
    dsn: str

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """A new autocommit connection; the caller closes it."""
        return psycopg.connect(self.dsn, autocommit=True)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run SQL on a connection of its own; the rows of the last statement, if it has any.

        Within a wait the connection is kept for the next time it asks.
        """

        def run(connection: psycopg.Connection[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
            cursor = connection.execute(statement.encode())
            while cursor.nextset():
                pass
            return cursor.fetchall() if cursor.description is not None else []

        held = held_now()
        if held is not None:
            return held.ask(self.dsn, run)
        with self.connect() as connection:
            return run(connection)


_CHOSEN = os.environ.get("WALBROOK_TEST_POSTGRES_VERSION")

DEFAULT_VERSION = int(_CHOSEN or 18)
if DEFAULT_VERSION not in RELEASES:
    raise ValueError(f"WALBROOK_TEST_POSTGRES_VERSION is {_CHOSEN}, not one of {list(RELEASES)}")

VERSIONS = (DEFAULT_VERSION,) if _CHOSEN else (16, DEFAULT_VERSION)
"""For tests that run on more than one."""


def since(version: int) -> pytest.MarkDecorator:
    """For a test of what older servers cannot do."""
    return pytest.mark.skipif(version > DEFAULT_VERSION, reason=f"needs Postgres {version}")


FROM_WHEEL = (16, 18)
"""These have pgvector and nothing of contrib; all others are the other way round."""

INSTALLED = "installed"
"""In place of a version: a server that the system has, with the extensions of contrib."""

_SYSTEM_SERVERS = Path("/usr/lib/postgresql")


def on_version(version: int | str, *more: object) -> ParameterSet:
    """A parameter: an older version is another server, which ``make test-sinks`` starts."""
    return pytest.param(
        version, *more, marks=[pytest.mark.sinks] if version in VERSIONS[:-1] else []
    )


ON_VERSIONS = [on_version(version) for version in VERSIONS]

on_both_versions = pytest.mark.parametrize(
    "database", ON_VERSIONS, indirect=True, ids="postgres_{}".format
)
"""Runs a test, or as ``pytestmark`` a module, on an older and on the newest Postgres."""


def programs_of(version: int) -> Path:
    """The folder with ``initdb``, ``pg_ctl`` and ``postgres`` of a major version."""
    return find_postgres(cast(Version, version)) if version in FROM_WHEEL else build_of(version)


def embedded(
    directory: Path,
    version: int = DEFAULT_VERSION,
    *,
    fast: bool = False,
    settings: Mapping[str, str] | None = None,
) -> EmbeddedPostgres:
    """A server for one test or module, of the version that is being tested."""
    installed = (version, programs_of(version))
    return EmbeddedPostgres(directory, fast=fast, settings=settings, installed=installed)


class PostgresServers:
    """The servers of a test run, each started when it is first asked for."""

    def __init__(self, running: ExitStack) -> None:
        self._running = running
        self._servers: dict[int | str, PostgresServer] = {}
        self._templates: dict[str, str] = {}

    def of(self, version: int | Literal["installed"]) -> PostgresServer:
        if isinstance(version, str):
            return self._installed()
        if version not in self._servers:
            self._servers[version] = self._running.enter_context(_server(version))
        found = self._servers[version]
        if found.version != version != DEFAULT_VERSION:
            pytest.skip(f"the server that was given is version {found.version}")
        return found

    def migrated(self, dsn: str) -> str:
        """The name of a database with the state schema, on the server at ``dsn``, to be copied."""
        if dsn not in self._templates:
            made = self._running.enter_context(fresh_database(dsn))
            with made.connect() as connection:
                migrate(connection)
            self._templates[dsn] = made.name
        return self._templates[dsn]

    def _installed(self) -> PostgresServer:
        found = find_installed()
        if found is None:
            pytest.skip("the system has no Postgres with contrib's extensions")
        version, _ = found
        if INSTALLED not in self._servers:
            self._servers[INSTALLED] = self._running.enter_context(_own(*found))
        assert self._servers[INSTALLED].version == version
        return self._servers[INSTALLED]


def find_installed() -> tuple[int, Path] | None:
    """The newest server in Debian's places that has hstore: its major version and programs."""
    for programs in sorted(_SYSTEM_SERVERS.glob("*/bin"), key=lambda one: one.parts, reverse=True):
        version = programs.parent.name
        share = Path("/usr/share/postgresql") / version / "extension"
        if (programs / "postgres").exists() and (share / "hstore.control").exists():
            return int(version), programs
    return None


@pytest.fixture(scope="session")
def postgres_servers() -> Iterator[PostgresServers]:
    with ExitStack() as running:
        yield PostgresServers(running)


@pytest.fixture(scope="session")
def postgres_server(postgres_servers: PostgresServers) -> PostgresServer:
    return postgres_servers.of(DEFAULT_VERSION)


@pytest.fixture
def database(
    request: pytest.FixtureRequest, postgres_servers: PostgresServers
) -> Iterator[Database]:
    version: int | Literal["installed"] = getattr(request, "param", DEFAULT_VERSION)
    dsn = postgres_servers.of(version).dsn
    migrated = request.node.get_closest_marker("migrated") is not None
    with fresh_database(dsn, copied=postgres_servers.migrated(dsn) if migrated else None) as made:
        yield made


@pytest.fixture
def state(database: Database) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection to the test's database, which is the state database too."""
    with database.connect() as connection:
        yield connection


@pytest.fixture
def there(postgres_server: PostgresServer) -> Iterator[Database]:
    """A second database on the server: a destination."""
    with fresh_database(postgres_server.dsn) as made:
        yield made


@contextmanager
def _server(version: int) -> Iterator[PostgresServer]:
    url = os.environ.get("WALBROOK_TEST_POSTGRES_URL")
    if url:
        yield _given_server(url)
    elif _docker_answers():
        with _container(version) as server:
            yield server
    else:
        with _own(version, programs_of(version)) as server:
            yield server


@contextmanager
def fresh_database(
    dsn: str, encoding: str | None = None, *, copied: str | None = None
) -> Iterator[Database]:
    """A database with a new name on the server at ``dsn``, dropped with its slots at the end.

    It is empty, or a copy of the database ``copied``.
    """
    name = f"test_{secrets.token_hex(6)}"
    create = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    given: dict[str, str] = {}
    if copied is not None:
        create += sql.SQL(" TEMPLATE {}").format(sql.Identifier(copied))
    if encoding is not None:
        create += sql.SQL(" ENCODING {} TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'").format(
            sql.Literal(encoding)
        )
        # Asked for UTF-8, a server without an encoding refuses what is none.
        given = {"client_encoding": encoding if encoding == "SQL_ASCII" else "UTF8"}
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(create)
    try:
        yield Database(name, make_conninfo(dsn, dbname=name, **given))
    finally:
        # Connect again: the test may have restarted the server.
        with psycopg.connect(dsn, autocommit=True) as admin:
            _drop_slots(admin, name)
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


# Ends each walsender and waits for its exit: the slot is free to drop only after that.
_END_READERS = """
SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots
WHERE database = %s AND active_pid IS NOT NULL
"""
_DROP_SLOTS = """
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
WHERE database = %s AND NOT active
"""
_COUNT_SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE database = %s"


def _drop_slots(admin: psycopg.Connection[tuple[Any, ...]], database: str) -> None:
    # A reader that reconnects may take the slot between the two statements.
    for _ in range(20):
        admin.execute(_END_READERS, [database])
        try:
            admin.execute(_DROP_SLOTS, [database])
        except psycopg.errors.ObjectInUse:
            continue
        row = admin.execute(_COUNT_SLOTS, [database]).fetchone()
        if row is not None and row[0] == 0:
            return
    raise AssertionError(f"a reader of {database} keeps coming back for its slot")


def _given_server(url: str) -> PostgresServer:
    with psycopg.connect(url, autocommit=True) as connection:
        version = connection.info.server_version // 10_000
    return PostgresServer(make_conninfo(url), version, restart=None)


@contextmanager
def _own(version: int, programs: Path) -> Iterator[PostgresServer]:
    # Not under pytest's own folder: that one is closed to the account the server runs as.
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-postgres-"))
    try:
        with EmbeddedPostgres(
            directory,
            fast=True,
            settings={"max_wal_senders": "30", "max_replication_slots": "30"},
            installed=(version, programs),
        ) as server:
            yield PostgresServer(server.dsn, server.version, server.restart)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _docker_answers() -> bool:
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    scheme, _, address = host.partition("://")
    name, _, port = address.rpartition(":")
    family = socket.AF_UNIX if scheme == "unix" else socket.AF_INET
    with socket.socket(family) as engine:
        engine.settimeout(DOCKER_TIMEOUT_S)
        try:
            engine.connect(address if scheme == "unix" else (name, int(port)))
            engine.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in engine.recv(64)
        except (OSError, ValueError):
            return False


@contextmanager
def _container(version: int) -> Iterator[PostgresServer]:
    from testcontainers.postgres import PostgresContainer

    container = PostgresContainer(f"postgres:{version}", driver=None).with_command(
        "postgres -c wal_level=logical -c max_wal_senders=30 -c max_replication_slots=30 "
        "-c fsync=off"
    )
    with container as running:
        yield _given_server(running.get_connection_url())
