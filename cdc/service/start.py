"""Everything that must be true before a process of the service starts.

The state schema is up to date, the source is usable, and the rows of sources and consumers are
there. It is safe to do again: a second start changes only the term.
"""

from __future__ import annotations

import psycopg
import structlog

from cdc.config import Config, Database
from cdc.errors import OperatorError
from cdc.replication.preflight import SourceIdentity, prepare_source
from cdc.state.migrate import Migration, migrate
from cdc.state.positions import is_registered, register_source

_logger = structlog.get_logger("walbrook.start")

Connection = psycopg.Connection[tuple[object, ...]]


def connect(dsn: str, what: str) -> Connection:
    """An ordinary autocommit connection; a server that does not answer is named by ``what``."""
    try:
        return psycopg.connect(
            dsn, autocommit=True, connect_timeout=10, application_name="walbrook"
        )
    except psycopg.OperationalError as error:
        raise OperatorError(
            f"{what} cannot be reached: {str(error).strip()}",
            fix="check that it runs, and its address, user and password in the configuration",
        ) from error


def migrate_state(config: Config) -> list[Migration]:
    """Bring the schema ``walbrook`` up to date."""
    with connect(config.state_dsn(), "the state database") as connection:
        return migrate(connection)


def prepare(config: Config) -> dict[str, int]:
    """Check and register every source; the answer is the term of each."""
    for migration in migrate_state(config):
        _logger.info("state.migrated", number=migration.number, name=migration.name)
    return {database.name: _prepare(config, database) for database in config.databases}


def _prepare(config: Config, database: Database) -> int:
    sinks = [sink for sink in config.sinks_of(database.name) if sink.status == "active"]
    wanted = sorted({table for sink in sinks for table in sink.source.include_tables or ()})
    with connect(config.state_dsn(), "the state database") as state:
        known = is_registered(state, database.name)
    if known and database.slot.create_if_not_exists:
        # A slot that was there once and is gone took changes with it: never made anew in silence.
        slot = database.slot.model_copy(update={"create_if_not_exists": False})
        database = database.model_copy(update={"slot": slot})
    with connect(database.dsn(), f"database {database.name}") as source:
        identity: SourceIdentity = prepare_source(source, database, wanted)
    for warning in identity.warnings:
        _logger.warning("source.warning", source=database.name, warning=warning)
    with connect(config.state_dsn(), "the state database") as state:
        return register_source(
            state,
            name=database.name,
            slot=database.slot.name,
            publication=database.publication.name,
            system_identifier=str(identity.system_identifier),
            slot_lsn=identity.slot_confirmed_lsn,
            consumers=[sink.name for sink in sinks],
        )
