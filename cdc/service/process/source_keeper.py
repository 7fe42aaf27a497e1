"""One source over the life of the service: prepared, again and again until it is ready; then looked
after.

It has a thread of its own, so a database that does not answer keeps no other source waiting.
Invariant: what keeps a source or one of its sinks from being served is in SQL, and a try follows
every failure with backoff. Only a service that holds the lock of the source runs this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection

import psycopg
import structlog

from cdc.backoff import Backoff
from cdc.config import Config, Database
from cdc.connection import connect
from cdc.error_text import public_text
from cdc.errors import TransientError, WalbrookError
from cdc.service.process.prepare import START_S, prepare_database
from cdc.service.process.source_tables import PublicationWatch
from cdc.state.health import Condition, report_conditions
from cdc.state.positions import report_not_ready
from cdc.state.schema_versions import table_oids
from cdc.stop import StopSignal

_logger = structlog.get_logger("walbrook.start")

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 1.0, 30.0
_LOOK_S = 30.0
_CLOSE_S = 2.0
_STATEMENT_S = 10
_POLL_S = 0.05
_END_DROPPING = """
SELECT walbrook.nothing_dropped(id) FROM walbrook.consumers
 WHERE source = %s AND active AND destination = 'pull'
"""
_PATIENCE_S = 15.0


class SourceKeeper:
    """Prepares a source and then watches its tables, until closed."""

    def __init__(self, config: Config, database: Database, *, look_s: float = _LOOK_S) -> None:
        self._config = config
        self._database = database
        self._sinks = [s for s in config.sinks_of(database.name) if s.status == "active"]
        self._tables = PublicationWatch(database.publication.name)
        self._look_s = look_s
        self._reported: dict[str, list[Condition]] = {}
        self._closing = threading.Event()
        self.term: int | None = None
        self.error: Exception | None = None  # of the last try, while it is not ready
        self._tried = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"source-{database.name}", daemon=True
        )
        self._thread.start()

    @property
    def has_tried(self) -> bool:
        """Whether the first try has ended, well or not."""
        return self._tried.is_set()

    @property
    def may_pass(self) -> bool:
        """Whether what keeps it is of the kind that may end by itself."""
        return isinstance(self.error, TransientError | psycopg.OperationalError)

    def follow(self, config: Config) -> None:
        """Another configuration, in which the database is read as before, counts from now on."""
        self._sinks = [s for s in config.sinks_of(self._name) if s.status == "active"]
        before, self._database = self._database, config.database(self._name)
        if before.publication != self._database.publication:
            # What was taken out of it on purpose is no loss.
            self._tables = PublicationWatch(self._database.publication.name)
        self._config = config

    def close(self) -> None:
        """Stop, without waiting for a database that does not answer."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        backoff = Backoff(_BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        while not self._closing.is_set():
            config = self._config
            try:
                term = prepare_database(config, config.database(self._name))
                if config is not self._config:
                    continue  # what was registered is no longer asked for
                self.term = term
                break
            except Exception as error:
                self._not_ready(error)
            self._tried.set()
            self._closing.wait(backoff.next_s())
        self.error = None
        self._tried.set()
        while not self._closing.is_set():
            try:
                self._look()
            except (psycopg.Error, WalbrookError) as error:
                # The reader itself reports a source, or a state database, that does not answer.
                _logger.debug("source.not_looked_at", source=self._name, error=str(error).strip())
            except Exception:
                _logger.exception("source.look_failed", source=self._name)
            self._closing.wait(self._look_s)

    def _not_ready(self, error: Exception) -> None:
        """Log and show what keeps the source; said again only when it is something else."""
        # The only source of a service ends the start with the same text.
        is_news = len(self._config.databases) > 1 and str(error) != str(self.error)
        self.error = error
        if is_news and isinstance(error, WalbrookError | psycopg.Error):
            _logger.error("source.not_ready", source=self._name, error=error)
        elif is_news:
            _logger.exception("source.not_ready", source=self._name)
        what, fix = public_text(error), ""
        if isinstance(error, WalbrookError):
            what, fix = error.what, error.fix
        try:
            with connect(self._config.state_dsn(), name="service", statement_s=_STATEMENT_S) as to:
                report_not_ready(
                    to,
                    name=self._name,
                    slot=self._database.slot.name,
                    publication=self._database.publication.name,
                    condition=Condition("source_not_ready", "error", what, fix),
                )
        except (psycopg.Error, WalbrookError) as problem:
            _logger.warning("service.state_unreachable", error=str(problem).strip())

    def _look(self) -> None:
        """Compare what sinks ask for with what is published, and report what is missing."""
        assert self.term is not None
        sinks = self._sinks
        named = [table for sink in sinks for table in sink.source.include_tables or ()]
        with connect(self._config.state_dsn(), name="tables", statement_s=_STATEMENT_S) as state:
            oids = table_oids(state, self._name, named)
        with connect(self._database.dsn(), name="tables", statement_s=_STATEMENT_S) as source:
            found = self._tables.conditions(source, sinks, oids)
        with connect(self._config.state_dsn(), name="tables", statement_s=_STATEMENT_S) as state:
            for sink, conditions in found.items():
                report_conditions(
                    state, self._name, self.term, conditions, consumer=sink, scope="tables_"
                )
            # A pull consumer without requests notices nothing itself.
            state.execute(_END_DROPPING, (self._name,))
        for sink, conditions in found.items():
            for condition in conditions:
                if condition not in self._reported.get(sink, []):
                    _logger.warning(
                        "source.tables", source=self._name, sink=sink, what=condition.what
                    )
        self._reported = found

    @property
    def _name(self) -> str:
        return self._database.name


def wait_for_sources(keepers: Collection[SourceKeeper], stop: StopSignal) -> None:
    """Wait until every source is ready or has failed, and one is ready; raises if none can be.

    Once one is ready the others are waited for only a little. What may pass by itself is waited
    for too, within a bound.
    """
    started = time.monotonic()
    while not stop.wait(_POLL_S):
        waited_s = time.monotonic() - started
        if any(keeper.term is not None for keeper in keepers):
            if waited_s > _PATIENCE_S or all(keeper.has_tried for keeper in keepers):
                return
        elif all(keeper.has_tried for keeper in keepers):
            errors = [keeper.error for keeper in keepers if keeper.error is not None]
            passing = any(keeper.may_pass for keeper in keepers) and waited_s < START_S
            if errors and not passing:
                raise errors[0]
