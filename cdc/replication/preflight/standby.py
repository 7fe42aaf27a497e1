"""Reading from a standby: what it needs, and the bounded creation of a slot there.

Creating a slot on a standby waits until its primary logs which transactions run, which an idle one
may not do for a long time. The primary can be asked to; that is all this room does to it.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from cdc.connection import connect
from cdc.errors import SourceError
from cdc.replication.preflight.problem import SourceProblem

DECODING_FROM: Final = 160_000
_PACE_S: Final = 1.0
_ASK: Final = "SELECT pg_log_standby_snapshot()"
_FEEDBACK: Final = "SELECT current_setting('hot_standby_feedback')"


def standby_problems(server_version: int) -> list[SourceProblem]:
    """A standby too old to be read from."""
    if server_version >= DECODING_FROM:
        return []
    major = server_version // 10_000
    return [
        SourceProblem(
            f"The source is a standby of Postgres {major}; standbys can be read from 16 on",
            "let the source be the primary, or upgrade",
        )
    ]


def standby_warnings(connection: psycopg.Connection[tuple[Any, ...]]) -> list[SourceProblem]:
    """How a slot on this standby could be lost."""
    row = connection.execute(_FEEDBACK).fetchone()
    if row is None or row[0] == "on":
        return []
    return [
        SourceProblem(
            "hot_standby_feedback is off on the standby, so the primary's vacuum can invalidate "
            "the slot",
            "ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_reload_conf(); -- on the "
            "standby, which also needs a primary_slot_name",
        )
    ]


class StandbySnapshots:
    """While open, asks the primary about once a second to log what a new slot waits for.

    Without a primary to ask, it only explains why the wait was too long.
    """

    def __init__(self, primary_dsn: str | None) -> None:
        self._dsn = primary_dsn
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="standby-snapshots", daemon=True)
        self._refusal = ""

    def __enter__(self) -> Self:
        if self._dsn is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._dsn is not None:
            self._thread.join(_PACE_S)

    def timed_out(self, slot: str, timeout_s: float) -> SourceError:
        """What to tell when the slot did not come about."""
        what = (
            f"The slot {slot} could not be created within {timeout_s:g} s, because the standby "
            "waits for its primary to log which transactions run"
        )
        by_hand = f"{_ASK}; -- on the primary, while it is created"
        if self._dsn is None:
            return SourceError(what, fix=f"set primary_url, or run {by_hand}")
        if self._refusal:
            grant = "GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO the role of primary_url"
            return SourceError(f"{what} ({self._refusal})", fix=f"{grant}, or run {by_hand}")
        return SourceError(what, fix="end the transactions that have been open on the primary")

    def _ask(self) -> None:
        assert self._dsn is not None
        try:
            with connect(self._dsn, name="standby-snapshots", statement_s=5) as primary:
                while not self._done.is_set():
                    primary.execute(_ASK)
                    self._done.wait(_PACE_S)
        except psycopg.Error as error:
            self._refusal = f"asked to, it answered: {error.diag.message_primary or error}".strip()
