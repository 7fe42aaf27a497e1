"""Being the only service of a source: a session advisory lock in the state database.

The lock comes before anything is changed, so that a second start by mistake is harmless. It lives
as long as its connection; when that is lost, the lock is taken again, and if another service was
faster, this one stops. A standby service waits for the lock without a bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import psycopg
import structlog

from cdc.config import Config
from cdc.connection import Connection
from cdc.errors import OperatorError, TransientError
from cdc.reach import UnreachableError, reach
from cdc.stop import StopSignal

_logger = structlog.get_logger("walbrook.service")

_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('walbrook.source.' || %s, 0))"
_UNLOCK = "SELECT pg_advisory_unlock(hashtextextended('walbrook.source.' || %s, 0))"
_UNLOCK_ALL = "SELECT pg_advisory_unlock_all()"
_NAME = "SELECT set_config('application_name', %s, false)"
_SERVICE, _STANDBY = "walbrook:service", "walbrook:standby"  # in pg_stat_activity
_WAIT_S, _POLL_S = 15.0, 0.5  # a service that was just killed needs a moment to lose its lock
_LOOK_S = 5.0


class Ownership:
    """The locks of all sources of a configuration, on one connection.

    All methods may be called from any thread.
    """

    def __init__(self, config: Config) -> None:
        self._dsn = config.state_dsn()
        self._called = config.state_called()
        self._sources = [database.name for database in config.databases]
        self._connection: Connection | None = None
        self._looked_at = 0.0
        self._is_away = False  # the state database, as was said
        self._guard = threading.Lock()

    def __enter__(self) -> Ownership:
        if self._connection is None:
            self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def stand_by(self, stop: StopSignal) -> bool:
        """Wait until no other service serves any of the sources, and take the locks of all.

        Returns False if a stop came first. A state database that does not answer is waited for, but
        not at the first try: then its address or password may be wrong.
        """
        self._connection = reach(self._dsn, self._called)
        while True:
            try:
                if self._connection is None:
                    self._connection = reach(self._dsn, self._called)
                self._connection.execute(_NAME, (_STANDBY,))
                if self._try_all(self._connection):
                    self._connection.execute(_NAME, (_SERVICE,))
                    return True
                self._is_away = False
            except (UnreachableError, psycopg.Error) as error:
                self.release()
                self._note_away(error)
            if stop.wait(_POLL_S):
                self.release()
                return False

    def _try_all(self, connection: Connection) -> bool:
        """Take all locks or none: two that wait must not each hold a part."""
        for source in self._sources:
            row = connection.execute(_LOCK, (source,)).fetchone()
            if row is None or not row[0]:
                connection.execute(_UNLOCK_ALL)
                return False
        return True

    def keep(self) -> None:
        """Look now and then whether the locks are still ours; take them again if not."""
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        with self._guard:
            self._keep()

    def add(self, sources: Iterable[str]) -> None:
        """Be the service of more sources: all of them, or none."""
        taken: list[str] = []
        with self._guard:
            try:
                for source in sources:
                    if self._connection is None:
                        raise TransientError("the state database does not answer", fix="try again")
                    self._lock(self._connection, source, wait_s=0.0)
                    taken.append(source)
            except BaseException:
                self._unlock(taken)
                raise
            self._sources += taken

    def remove(self, sources: Iterable[str]) -> None:
        """Be the service of these no more."""
        with self._guard:
            gone = [source for source in sources if source in self._sources]
            self._sources = [source for source in self._sources if source not in gone]
            self._unlock(gone)

    def _unlock(self, sources: Iterable[str]) -> None:
        """Give back locks; those of a connection that is lost went with it."""
        with suppress(psycopg.OperationalError):
            for source in sources:
                if self._connection is not None:
                    self._connection.execute(_UNLOCK, (source,))

    def _keep(self) -> None:
        self._looked_at = time.monotonic()
        try:
            if self._connection is not None:
                self._connection.execute("SELECT 1")
                return
        except psycopg.Error:
            self.release()
        try:
            self._take()
        except (OperatorError, TransientError) as error:
            if self._connection is not None:
                raise
            self._note_away(error)
        else:
            self._is_away = False

    def _note_away(self, error: Exception) -> None:
        if not self._is_away:
            _logger.warning("service.state_unreachable", error=str(error).strip())
        self._is_away = True

    def _take(self) -> None:
        self._connection = reach(self._dsn, self._called)
        try:
            for source in self._sources:
                self._lock(self._connection, source)
        except psycopg.OperationalError as error:
            self.release()
            raise TransientError(f"the state database went away: {str(error).strip()}") from error

    def _lock(self, connection: Connection, source: str, wait_s: float = _WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            row = connection.execute(_LOCK, (source,)).fetchone()
            if row is not None and row[0]:
                return
            if time.monotonic() >= deadline:
                raise OperatorError(
                    f"another service serves source {source}",
                    fix=f"stop the other one; pg_stat_activity shows it as {_SERVICE}. To wait "
                    "until it ends, start with --standby",
                )
            time.sleep(_POLL_S)

    def release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
