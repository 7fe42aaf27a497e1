"""Trying everything that a configuration connects to: databases, the state, destinations.

Invariants: nothing changes anywhere: no slot, publication, schema, file or key is made; what is
tried in a transaction is rolled back. All places are tried at once, each within the deadline.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import psycopg

from cdc.config import Config, Database, Http
from cdc.errors import OperatorError, WalbrookError
from cdc.probing import ProbeResult, probe_all
from cdc.reach import reach
from cdc.replication.preflight import check_source
from cdc.replication.preflight.problem import SourceProblem
from cdc.service.process.prepare import check_served_before, tables_wanted
from cdc.state.positions import registered_slot

_GRACE_S = 10.0  # for the process that tries the sinks to start
_STATE = """
SELECT to_regclass('walbrook.consumers') IS NOT NULL,
       has_database_privilege(current_database(), 'CREATE'),
       coalesce(has_table_privilege(to_regclass('walbrook.consumers'), 'UPDATE'), true)
"""


def check_connections(config: Config, path: Path, deadline_s: float) -> list[ProbeResult]:
    """What was found at each place, in the order of the file; failures have ``ok`` false."""
    places: dict[str, Callable[[], str]] = {
        f"database {database.name}": _source(config, database) for database in config.databases
    }
    places["state database"] = lambda: _state(config)
    places["log directory"] = lambda: _directory(config.log.directory)
    if config.service.http.enabled:
        places["HTTP port"] = lambda: _port(config.service.http)
    with ThreadPoolExecutor(1) as beside:
        sinks = beside.submit(_sinks, config, path, deadline_s)
        return [*probe_all(places, deadline_s), *sinks.result()]


def _source(config: Config, database: Database) -> Callable[[], str]:
    def look() -> str:
        warnings = check_database(config, database)
        return "ready" + "".join(f"; note: {warning}" for warning in warnings)

    return look


def check_database(config: Config, database: Database) -> list[SourceProblem]:
    """Whether a source can be served; OperatorError if not. Returns the warnings."""
    wanted, schemas = tables_wanted(config, database)
    registered = _registered_slot(config, database)
    with reach(database.dsn(), f"database {database.name}") as connection:
        if registered is not None:
            check_served_before(connection, database, registered)
        return check_source(
            connection,
            database,
            wanted,
            schemas_wanted=schemas,
            reads=lambda schema, name: is_backfilled(config, database, schema, name),
        )


def is_backfilled(config: Config, database: Database, schema: str, name: str) -> bool:
    """Whether a sink is to get the rows first that the table has already."""
    for sink in config.sinks_of(database.name):
        wanted = sink.initial_backfill
        if sink.status != "active" or not wanted or not sink.source.takes(schema, name):
            continue
        if isinstance(wanted, bool) or (schema, name) in {
            (each.schema, each.table) for each in wanted
        }:
            return True
    return False


def _registered_slot(config: Config, database: Database) -> str | None:
    """The slot that a source was read through; what is wrong with the state is said there."""
    try:
        with reach(config.state_dsn(), config.state_called()) as state:
            return registered_slot(state, database.name)
    except (psycopg.Error, WalbrookError):
        return None


def _state(config: Config) -> str:
    with reach(config.state_dsn(), config.state_called()) as connection:
        row = connection.execute(_STATE).fetchone()
    assert row is not None
    is_there, may_create, may_write = row
    if not is_there and not may_create:
        raise OperatorError(
            "the role may not create the schema walbrook in the state database",
            fix="GRANT CREATE ON DATABASE to the role of state.url, or run walbrook migrate as "
            "another",
        )
    if not may_write:
        raise OperatorError(
            "the role may not write in the schema walbrook of the state database",
            fix="connect as the role that ran walbrook migrate",
        )
    return (
        "connected; the schema walbrook is there"
        if is_there
        else ("connected; the schema walbrook is made by the first start")
    )


def _directory(path: Path) -> str:
    """Whether the log can be written there; the nearest folder that exists decides."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise OperatorError(
            f"{there} cannot be written", fix="choose another log.directory, or chown it"
        )
    free = shutil.disk_usage(there).free
    made = "" if there == path else "; made by the first start"
    return f"{path}: {free / 2**30:,.1f} GiB free{made}"


def _port(http: Http) -> str:
    """Whether the service can listen there; the one that runs already may be the service itself."""
    try:
        socket.create_server((http.host, http.port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise OperatorError(
                f"cannot listen on {http.host}:{http.port}: {error.strerror}",
                fix="choose another service.http.host or service.http.port",
            ) from None
        return f"{http.host}:{http.port} is in use, which is right if this service runs"
    return f"{http.host}:{http.port} is free"


def _sinks(config: Config, path: Path, deadline_s: float) -> list[ProbeResult]:
    """Sinks are another room: they are tried by a process of their own."""
    if not any(sink.status == "active" for sink in config.sinks):
        return []
    command = [sys.executable, "-m", "sinks.connect_check", str(path), str(deadline_s)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s + _GRACE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [ProbeResult("sinks", False, "their check did not end in time")]
    if done.returncode:
        last = next(iter(reversed(done.stderr.strip().splitlines())), "it said nothing")
        status = f"their check ended with status {done.returncode}: {last}"
        return [ProbeResult("sinks", False, status)]
    found = [ProbeResult(**orjson.loads(line)) for line in done.stdout.splitlines()]
    kinds = {sink.name: sink.destination.type for sink in config.sinks}
    return [
        ProbeResult(f"sink {each.name} ({kinds[each.name]})", each.ok, each.text) for each in found
    ]
