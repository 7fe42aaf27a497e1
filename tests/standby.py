"""A primary and a real standby of it, for failovers."""

from __future__ import annotations

import atexit
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg

from cdc.replication.source.identity import Recorded
from demo.embedded_postgres import EmbeddedPostgres, Version
from demo.server_account import server_account
from tests.waiting import until


def execute(dsn: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description is not None else []


@dataclass(frozen=True)
class Pair:
    """Table ``item`` published as ``pub`` on a primary, and its standby."""

    primary: EmbeddedPostgres
    standby: EmbeddedPostgres

    @property
    def recorded(self) -> Recorded:
        ((identifier,),) = execute(
            self.primary.dsn, "SELECT system_identifier FROM pg_control_system()"
        )
        return Recorded(str(identifier), 1)

    def insert(self, number: int) -> None:
        execute(self.primary.dsn, f"INSERT INTO item VALUES ({number})")

    def until_replayed(self) -> None:
        """The standby has all that the primary has now."""
        ((end,),) = execute(self.primary.dsn, "SELECT pg_current_wal_flush_lsn()")
        until(
            "the standby to catch up",
            lambda: execute(self.standby.dsn, f"SELECT pg_last_wal_replay_lsn() >= '{end}'")[0][0],
        )

    def promote(self) -> None:
        """The primary is gone, the standby takes over."""
        self.primary.stop(immediate=True)
        execute(self.standby.dsn, "SELECT pg_promote()")


@contextmanager
def primary_and_standby(version: Version = 18) -> Iterator[Pair]:
    """Both servers, running; the standby keeps failover slots in step where it can."""
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-standby-"))
    with ExitStack() as running:
        running.callback(shutil.rmtree, directory, ignore_errors=True)
        for name in ("primary", "standby"):
            _copy(_prepared(version) / name, directory / name)
        primary = EmbeddedPostgres(directory / "primary", version, fast=True)
        running.enter_context(primary)
        with (directory / "standby" / "data" / "postgresql.auto.conf").open("a") as conf:
            conf.write(f"primary_conninfo = '{primary.dsn}'\n")
        standby = EmbeddedPostgres(directory / "standby", version, fast=True)
        running.enter_context(standby)
        yield Pair(primary, standby)


@cache
def _prepared(version: Version) -> Path:
    """A folder with both servers, stopped: copying them takes less time than making them."""
    directory = Path(tempfile.mkdtemp(prefix="walbrook-test-standby-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    settings = {"synchronous_commit": "local"}
    with EmbeddedPostgres(directory / "primary", version, fast=True, settings=settings) as primary:
        execute(primary.dsn, "CREATE TABLE item (id int PRIMARY KEY)")
        execute(primary.dsn, "CREATE PUBLICATION pub FOR TABLE item")
        execute(primary.dsn, "SELECT pg_create_physical_replication_slot('standby', true)")
        _back_up(primary, directory / "standby")
    return directory


def _back_up(primary: EmbeddedPostgres, directory: Path) -> None:
    data = directory / "data"
    directory.mkdir()
    shutil.copy(primary.directory / "password", directory / "password")
    subprocess.run(
        [
            str(primary.bin_directory / "pg_basebackup"),
            *("-d", primary.dsn, "-D", str(data), "-X", "stream", "-c", "fast", "--no-sync"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    settings = {
        "primary_slot_name": "standby",
        "hot_standby_feedback": "on",
        "wal_receiver_status_interval": "1s",
    }
    if primary.version >= 17:
        settings["sync_replication_slots"] = "on"
    with (data / "postgresql.auto.conf").open("a") as conf:
        conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
    (data / "standby.signal").touch()


def _copy(prepared: Path, directory: Path) -> None:
    shutil.copytree(prepared, directory)
    account = server_account()
    if account is not None:
        for path in (directory, *directory.rglob("*")):
            shutil.chown(path, account, account)


def slot_name() -> str:
    return f"slot_{secrets.token_hex(4)}"
