"""``/healthz`` and ``/readyz``: cheap answers for what watches the process from outside.

``/healthz`` asks no database: it fails only when the process should be started again. ``/readyz``
asks for one row per source, once a second at most, however often it is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import psycopg
from psycopg.rows import dict_row
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cdc.connection import connect

_HUNG_S: Final = 300.0
"""The supervisor may wait for a state database that hangs: two statements and a connection."""
_FRESH_S: Final = 1.0
_SILENT_S: Final = 30.0  # a reader writes its row about every ten seconds
_STATEMENT_S: Final = 2

_SOURCES = """
SELECT s.name, s.state,
       extract(epoch FROM clock_timestamp() - s.seen_at)::float8 AS seen_age_s,
       EXISTS (SELECT FROM walbrook.feeds f
                WHERE f.source = s.name AND f.last_error IS NOT NULL) AS feed_fails,
       (SELECT count(*) FROM walbrook.consumers c
         WHERE c.source = s.name AND c.active AND c.paused_at IS NULL) AS wanted,
       (SELECT count(*) FROM walbrook.consumers c
         WHERE c.source = s.name AND c.active AND c.paused_at IS NULL
           AND c.state IN ('live', 'catching_up')) AS served
  FROM walbrook.sources s
 WHERE %(sources)s::text[] IS NULL OR s.name = ANY (%(sources)s)
 ORDER BY 1
"""


class Processes(Protocol):
    """Who knows the processes of the service."""

    def processes(self) -> dict[str, bool]: ...

    def starting(self) -> list[str]: ...

    def silent_s(self) -> float:
        """For how long its main loop has not come round."""
        ...


class Readiness:
    """Whether every source streams and delivers; a sink that fails alone changes nothing."""

    def __init__(
        self, state_dsn: str, processes: Processes, sources: Sequence[str] | None = None
    ) -> None:
        """``sources`` is a list that its owner may change."""
        self._dsn = state_dsn
        self._processes = processes
        self._sources = sources
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._reasons: list[str] = []

    def reasons(self) -> list[str]:
        """Why it is not ready, a sentence each; none means ready."""
        with self._lock:
            if time.monotonic() - self._asked_at >= _FRESH_S:
                self._reasons = [*self._of_processes(), *self._of_sources()]
                self._asked_at = time.monotonic()
            return self._reasons

    def _of_processes(self) -> Iterator[str]:
        for name, runs in self._processes.processes().items():
            if not runs:
                yield f"{name} does not run"
        for name in self._processes.starting():
            yield f"{name} is starting"

    def _of_sources(self) -> list[str]:
        sources = None if self._sources is None else list(self._sources)
        try:
            with connect(self._dsn, name="probe", statement_s=_STATEMENT_S) as connection:
                rows = connection.cursor(row_factory=dict_row)
                found = rows.execute(_SOURCES, {"sources": sources}).fetchall()
        except psycopg.Error:
            return ["the state database does not answer"]
        reasons = [reason for row in found for reason in _reasons(row)]
        known = {str(row["name"]) for row in found}
        unknown = [name for name in sources or () if name not in known]
        return reasons + [f"{name} was never read" for name in unknown]


def _reasons(row: dict[str, object]) -> Iterator[str]:
    """Why one source is not read or not delivered."""
    name, seen_age_s = row["name"], row["seen_age_s"]
    if row["state"] != "streaming":
        yield f"the reader of {name} is {row['state']}"
    elif not isinstance(seen_age_s, float) or seen_age_s > _SILENT_S:
        yield f"the reader of {name} is silent"
    if row["feed_fails"]:
        yield f"the feed of {name} does not move"
    if row["wanted"] and not row["served"]:
        yield f"no consumer of {name} is served"


def probe_routes(readiness: Readiness, processes: Processes) -> list[Route]:
    """``/healthz`` and ``/readyz``."""

    def alive(_request: Request) -> Response:
        hangs = processes.silent_s() > _HUNG_S
        body = {"status": "hangs" if hangs else "alive", "role": "active"}
        return JSONResponse(body, 503 if hangs else 200)

    def ready(_request: Request) -> Response:
        reasons = readiness.reasons()
        body = {
            "status": "not ready" if reasons else "ready",
            "role": "active",
            "reasons": reasons,
        }
        return JSONResponse(body, 503 if reasons else 200)

    return [Route("/healthz", alive), Route("/readyz", ready)]
