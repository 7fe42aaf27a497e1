"""Everything that must be true before a process of the service starts.

The state schema is up to date, the source is usable, and the rows of sources and consumers are
there. It is safe to do again: a second start changes only the term. Each source is prepared by
itself: one that is not ready keeps no other from being served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict

from cdc.backoff import Backoff
from cdc.config import (
    Config,
    Database,
    Destination,
    KafkaDestination,
    PostgresDestination,
    SinkConfig,
)
from cdc.connection import Connection
from cdc.errors import SourceError, TransientError
from cdc.queue.pull_consumers import register_pulls
from cdc.reach import UnreachableError, reach
from cdc.replication.preflight import SourceIdentity, prepare_source
from cdc.replication.source.slot_control import publication_missing
from cdc.replication.source.slot_row import repair
from cdc.state.consumers import Described, lock_source, register_consumers
from cdc.state.health import resolve_unserved
from cdc.state.migrate import Migration, migrate
from cdc.state.positions import register_source, registered_slot
from cdc.stop import StopSignal

_logger = structlog.get_logger("walbrook.start")

T = TypeVar("T")

START_S = 60.0
"""How long a start goes on after connections that were cut."""
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.5, 10.0

_SLOT = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s"
_PUBLICATION = "SELECT 1 FROM pg_publication WHERE pubname = %s"


def patiently(step: Callable[[], T], stop: StopSignal) -> T:
    """Do one step of the start; where a connection was cut, do it again, within a bound.

    A database that could not be connected to at all ends the start at once: most likely its
    address or password is wrong.
    """
    started, cut = time.monotonic(), False
    backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
    while True:
        try:
            return step()
        except (UnreachableError, TransientError, psycopg.OperationalError) as error:
            cut = cut or not isinstance(error, UnreachableError)
            if not cut or time.monotonic() - started > START_S:
                raise
            pause_s = round(backoff.next_s(), 1)
            _logger.warning("start.again", error=str(error).strip(), again_in_s=pause_s)
            if stop.wait(pause_s):
                raise


def migrate_state(config: Config) -> list[Migration]:
    """Bring the schema ``walbrook`` up to date."""
    with reach(config.state_dsn(), config.state_called()) as connection:
        return migrate(connection)


def prepare(config: Config) -> dict[str, int]:
    """Prepare the state database and every source. Returns the term of each source."""
    prepare_state(config)
    return {database.name: prepare_database(config, database) for database in config.databases}


def prepare_state(config: Config) -> None:
    """Bring the state database up to date."""
    for migration in migrate_state(config):
        _logger.info("state.migrated", number=migration.number, name=migration.name)
    with reach(config.state_dsn(), config.state_called()) as state:
        resolve_unserved(state, [database.name for database in config.databases])


def check_served_before(source: Connection, database: Database, registered: str) -> None:
    """Refuse a source that was read through the slot ``registered`` and now lacks its slot.

    Nor may its publication be missing: what was committed without it never came through the slot.
    """
    _check_slot_is_there(source, database, registered)
    name = database.publication.name
    if source.execute(_PUBLICATION, (name,)).fetchone() is None:
        raise publication_missing(name)


def _check_slot_is_there(source: Connection, database: Database, registered: str) -> None:
    """A slot that was there once took changes with it: it is never silently recreated."""
    slot = database.slot.name
    if source.execute(_SLOT, (slot,)).fetchone() is None:
        if slot != registered and source.execute(_SLOT, (registered,)).fetchone() is not None:
            raise SourceError(
                f"replication slot {slot} of source {database.name} does not exist; the source was "
                f"read through another slot so far, {registered}, which is still there",
                fix=f"write slot: {{name: {registered}}} for the database in the configuration, "
                "as it was before",
            )
        raise SourceError(
            f"replication slot {slot} of source {database.name} no longer exists; changes since "
            "then that are not in the log are lost",
            fix=f"{repair(database.name)}, then start again. To have what the log still holds "
            f"delivered first, create it (SELECT pg_create_logical_replication_slot('{slot}', "
            "'pgoutput');) and start: the reader then stops, says where the gap is, and how to "
            "repair or accept it",
        )


def _described_type(destination: Destination) -> str:
    """Its type; Kafka keeps a position in one of its two modes alone."""
    if isinstance(destination, KafkaDestination) and destination.exactly_once:
        return "kafka_exactly_once"
    return destination.type


def described(sink: SinkConfig) -> Described:
    """What SQL is to know of a sink."""
    backlog = sink.max_backlog
    return Described(
        _described_type(sink.destination),
        sink.priority,
        None if backlog is None else backlog.size,
        None if backlog is None else backlog.on_full,
        " ".join(map(str, sink.destination.place(sink.name) or ())),
        sink.rewind_ways,
        sink.reload_refusal,
        takes=sink.source.model_dump(exclude_none=True),
        repeats_by_key=(
            isinstance(sink.destination, PostgresDestination) and sink.destination.mode == "mirror"
        ),
    )


def tables_wanted(config: Config, database: Database) -> tuple[Sequence[str], Sequence[str]]:
    """The tables and schemas that active sinks name.

    What a sink of several databases asks for need not be in each of them.
    """
    sinks = [sink for sink in config.sinks_of(database.name) if sink.status == "active"]
    own = [sink.source for sink in sinks if len(sink.sources) == 1]
    wanted = sorted({table for source in own for table in source.include_tables or ()})
    return wanted, sorted({name for source in own for name in source.include_schemas or ()})


def _initial(sink: SinkConfig) -> list[str]:
    """The tables whose existing rows a new sink gets; ``*`` for all that it takes."""
    wanted = sink.initial_backfill
    if isinstance(wanted, bool):
        return ["*"] if wanted else []
    return [table.written() for table in wanted]


def prepare_database(config: Config, database: Database) -> int:
    """Check and register one source. Returns its new term.

    Tables that sinks name are checked for a source that is new. Of a known source a table may have
    been renamed meanwhile: that concerns its sinks, and the service reports it while it runs.
    """
    sinks = [sink for sink in config.sinks_of(database.name) if sink.status == "active"]
    wanted, schemas = tables_wanted(config, database)
    with reach(config.state_dsn(), config.state_called()) as state:
        registered = registered_slot(state, database.name)
    if registered is not None:
        wanted, schemas = [], []
    with reach(database.dsn(), f"database {database.name}") as source:
        if registered is not None:
            check_served_before(source, database, registered)
        identity: SourceIdentity = prepare_source(
            source,
            database,
            wanted,
            schemas_wanted=schemas,
            primary_dsn=database.primary_dsn(),
        )
    for warning in identity.warnings:
        _logger.warning("source.warning", source=database.name, warning=warning)
    with reach(config.state_dsn(), config.state_called()) as state:
        term = register_source(
            state,
            name=database.name,
            slot=database.slot.name,
            publication=database.publication.name,
            system_identifier=str(identity.system_identifier),
            slot_lsn=identity.slot_confirmed_lsn,
            consumers=[sink.name for sink in sinks],
            starts={sink.name: sink.start_at for sink in sinks},
            wal_end_lsn=identity.wal_end_lsn,
            described={sink.name: described(sink) for sink in sinks},
            backfills={sink.name: _initial(sink) for sink in sinks if sink.initial_backfill},
        )
        _register_pulls(state, database, sinks)
        return term


def register_sinks(
    state: Connection, config: Config, database: Database, wal_end_lsn: int | None
) -> None:
    """Register the sinks of a source that is being served; the caller has a transaction.

    A source that has not been ready yet registers its sinks when it is.
    """
    sinks = [sink for sink in config.sinks_of(database.name) if sink.status == "active"]
    if lock_source(state, database.name):
        register_consumers(
            state,
            database.name,
            [sink.name for sink in sinks],
            starts={sink.name: sink.start_at for sink in sinks},
            wal_end_lsn=wal_end_lsn,
            described={sink.name: described(sink) for sink in sinks},
            backfills={sink.name: _initial(sink) for sink in sinks if sink.initial_backfill},
        )
        _register_pulls(state, database, sinks)


def _register_pulls(state: Connection, database: Database, sinks: Sequence[SinkConfig]) -> None:
    place = conninfo_to_dict(database.dsn())
    register_pulls(
        state,
        database.name,
        sinks,
        hostname=str(place.get("host", "")),
        database=str(place.get("dbname", "")),
    )
