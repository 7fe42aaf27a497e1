"""Applying a configuration to the running service, as SQL, the command line, HTTP or SIGHUP ask.

Requests are rows of ``walbrook.config_requests``, and one thread of the supervisor's process takes
them one by one. Invariants: a request that is refused has changed nothing, and no process that was
started again meanwhile has read it. Before the driver hears of a new consumer its row is there, and
holds the log; a consumer that is removed is inactive before its worker ends. All else goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final

import psycopg
import structlog

from cdc.config import Config
from cdc.config.diff import ChangeKind
from cdc.connection import Connection, connect
from cdc.error_text import public_text
from cdc.errors import WalbrookError
from cdc.service.live_config.file import ConfigCopy, ConfigFile
from cdc.service.live_config.new_tables import newly_taken, start_backfills
from cdc.service.live_config.plan import ConfigPlan, plan_config
from cdc.service.live_config.publications import PublishedChange, changed_publications
from cdc.service.process.ownership import Ownership
from cdc.service.process.prepare import register_sinks
from cdc.service.process.source_keeper import SourceKeeper
from cdc.service.process.supervisor import ServiceChange, Supervisor
from cdc.state.configurations import (
    ConfigAnswer,
    ConfigRequest,
    answer_request,
    is_taken,
    listen,
    request_own,
    store_configuration,
    take_request,
    wait_for_request,
)
from cdc.state.consumers import lock_source, register_consumers
from cdc.state.health import resolve_unserved

_logger = structlog.get_logger("walbrook.config")

_LOOK_S: Final = 1.0
_AWAY_S: Final = 2.0
_REPORT_S: Final = 120.0
_TAKEN_S: Final = 120.0
"""How long the workers that end may take for what they have begun."""
_READY_S: Final = 30.0
_POLL_S: Final = 0.05
_STATEMENT_S: Final = 60
_BRIEFLY: Final = "SET LOCAL lock_timeout = '5s'"
_SIGNAL: Final = "SIGHUP"


class ConfigApplier:
    """Plans and applies the file of one service, in a thread of its own, until closed."""

    def __init__(
        self,
        running: ConfigFile,
        revision: int,
        copy: ConfigCopy,
        supervisor: Supervisor,
        keepers: Mapping[str, SourceKeeper],
        ownership: Ownership,
        signalled: threading.Event,
    ) -> None:
        """``signalled`` is set by SIGHUP; ``keepers`` are those of the sources now."""
        self._running, self._revision = running, revision
        self._copy, self._supervisor, self._ownership = copy, supervisor, ownership
        self._keepers = dict(keepers)
        self._signalled = signalled
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="config", daemon=True)
        self._thread.start()

    @property
    def config(self) -> Config:
        """What runs now."""
        return self._running.config

    def close(self) -> None:
        """Take no more requests; one that is being applied is finished first, within a bound."""
        self._closing.set()
        self._thread.join(_READY_S)
        for keeper in self._keepers.values():
            keeper.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                dsn = self._running.config.state_dsn()
                with connect(dsn, name="config", statement_s=_STATEMENT_S) as state:
                    listen(state)
                    self._serve(state)
            except psycopg.Error as error:
                _logger.debug("config.state_unreachable", error=str(error).strip())
            except Exception:
                _logger.exception("config.broke")
            self._closing.wait(_AWAY_S)

    def _serve(self, state: Connection) -> None:
        while not self._closing.is_set():
            if self._signalled.is_set():
                request_own(state, self._running.sources[0], _SIGNAL)
                # A signal that came since then is answered as well: the file is read after this.
                self._signalled.clear()
            request = take_request(state, self._running.sources)
            if request is None:
                wait_for_request(state, _LOOK_S)
            else:
                self._report(request, self._answer(request))

    def _report(self, request: ConfigRequest, answer: ConfigAnswer) -> None:
        """Write the answer; a state database that is away is waited for, within a bound."""
        deadline = time.monotonic() + _REPORT_S
        while True:
            try:
                with self._connected() as state:
                    answer_request(state, request.id, answer)
                return
            except psycopg.Error as error:
                if self._closing.wait(_AWAY_S) or time.monotonic() > deadline:
                    _logger.error("config.not_answered", request=request.id, error=error)
                    return

    def _answer(self, request: ConfigRequest) -> ConfigAnswer:
        try:
            plan = plan_config(self._running, partly=request.partly)
            if request.action == "plan":
                with self._published(plan, trial=True):
                    return ConfigAnswer(True, str(plan), changes=plan.diff.to_json())
            notes = self._apply(plan, request.asked_by)
        except (WalbrookError, psycopg.Error) as error:
            _logger.error("config.refused", asked_by=request.asked_by, error=error)
            if isinstance(error, WalbrookError):
                return ConfigAnswer(False, error.what, error.fix)
            return ConfigAnswer(False, public_text(error), "try again")
        except Exception as error:
            _logger.exception("config.broke")
            return ConfigAnswer(False, public_text(error), "see the log of the service")
        _logger.info("config.applied", revision=self._revision, asked_by=request.asked_by)
        return ConfigAnswer(
            True, "\n".join([str(plan), *notes]), "", plan.diff.to_json(), self._revision
        )

    def _apply(self, plan: ConfigPlan, asked_by: str) -> list[str]:
        """Run what was planned. Returns what else there is to say."""
        if not plan.diff.changes:
            return []
        before, begun = self._running.config, plan.begun_databases
        added = plan.diff.named("database", ChangeKind.ADDED)
        self._ownership.add(added)
        try:
            self._copy.prepare(plan.file)
            with self._published(plan) as published:
                self._register(plan, published, asked_by)
        except BaseException:
            self._copy.discard()
            self._ownership.remove(added)
            raise
        # From here on it runs: what fails is said, and refuses nothing.
        self._copy.replace()
        self._running = plan.file
        ended = [self._keepers.pop(name) for name in plan.ended_databases]
        for keeper in self._keepers.values():
            keeper.follow(plan.file.config)
        self._change(ended=plan.ended_databases)
        for keeper in ended:
            keeper.close()
        late = self._await_taken()
        return [
            *late,
            *self._begin(begun),
            *_noted(lambda: self._after_removal(plan, before)),
            *_noted(lambda: self._backfill(plan, before, published, taken=not late)),
        ]

    def _published(
        self, plan: ConfigPlan, *, trial: bool = False
    ) -> AbstractContextManager[dict[str, PublishedChange]]:
        return changed_publications(
            self._running.config, plan.file.config, plan.concerned, trial=trial
        )

    def _register(
        self, plan: ConfigPlan, published: Mapping[str, PublishedChange], asked_by: str
    ) -> None:
        """The rows of consumers, and the configuration itself, in one transaction."""
        config = plan.file.config
        kept = self._keepers.keys() - set(plan.ended_databases)
        document = plan.file.document()
        with self._connected() as state, state.transaction():
            state.execute(_BRIEFLY)
            for database in sorted(config.databases, key=lambda each: each.name):
                if database.name in kept:
                    found = published.get(database.name)
                    wal_end_lsn = None if found is None else found.wal_end_lsn
                    register_sinks(state, config, database, wal_end_lsn)
            for name in sorted(plan.diff.named("database", ChangeKind.REMOVED)):
                if lock_source(state, name):
                    register_consumers(state, name, [])
            self._revision = store_configuration(
                state, plan.file.sources, str(plan.file.path), document, asked_by
            )

    def _change(self, *, ended: Sequence[str] = ()) -> None:
        self._supervisor.change(
            ServiceChange(dict(self._keepers), frozenset(ended), self._revision)
        )

    def _await_taken(self) -> list[str]:
        """Until every worker serves by the new configuration. Returns what is still under way."""
        deadline = time.monotonic() + _TAKEN_S
        while time.monotonic() < deadline and not self._closing.is_set():
            with suppress(psycopg.Error), self._connected() as state:
                if is_taken(state, self._revision) and not self._supervisor.is_changing:
                    return []
            self._closing.wait(_POLL_S)
        return [
            "not all workers serve by it yet: some still end what they had begun "
            "(walbrook.configurations.taken_at says when they do)"
        ]

    def _begin(self, names: Sequence[str]) -> list[str]:
        """Serve databases that are new, or whose reader has ended. Returns what keeps them."""
        if not names:
            return []
        config = self._running.config
        begun = {name: SourceKeeper(config, config.database(name)) for name in names}
        self._keepers |= begun
        self._change()
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and not self._closing.is_set():
            if all(keeper.has_tried for keeper in begun.values()):
                break
            self._closing.wait(_POLL_S)
        return [
            f"database {name} is not ready yet: {keeper.error or 'it has not answered'}"
            for name, keeper in begun.items()
            if keeper.term is None
        ]

    def _after_removal(self, plan: ConfigPlan, before: Config) -> list[str]:
        removed = plan.diff.named("database", ChangeKind.REMOVED)
        if not removed:
            return []
        self._ownership.remove(removed)
        with self._connected() as state:
            resolve_unserved(state, self._running.sources)
        return [
            f"the slot {before.database(name).slot.name} of database {name} stays and holds WAL "
            "back; if it is not needed any more: "
            f"SELECT pg_drop_replication_slot('{before.database(name).slot.name}')"
            for name in removed
        ]

    def _backfill(
        self,
        plan: ConfigPlan,
        before: Config,
        published: Mapping[str, PublishedChange],
        *,
        taken: bool,
    ) -> list[str]:
        """Existing rows of tables that a sink with ``initial_backfill`` newly takes."""
        tables = newly_taken(before, plan.file.config, published)
        if not tables:
            return []
        if not taken:
            return [
                f"the existing rows of {table} were not asked for: walbrook backfill start "
                f"{sink} {table}"
                for sink, table in tables
            ]
        with self._connected() as state:
            return start_backfills(state, tables)

    def _connected(self) -> Connection:
        dsn = self._running.config.state_dsn()
        return connect(dsn, name="config", statement_s=_STATEMENT_S)


def _noted(step: Callable[[], list[str]]) -> list[str]:
    """What a step says, or what it failed of."""
    try:
        return step()
    except WalbrookError as error:
        return [str(error)]
    except psycopg.Error as error:
        return [public_text(error)]
