"""Waiting for a condition, never for a time.

A condition is often a question to a database, and a connection for each time it is put would cost
more than what is waited for: while a wait lasts, what its condition opens through ``Held`` stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import psycopg

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.5
T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]


class Held:
    """The connections of one wait, one for each address, closed when it is over."""

    def __init__(self) -> None:
        self._open: dict[str, Connection] = {}

    def ask(self, dsn: str, question: Callable[[Connection], T]) -> T:
        """Put a question on the connection that is there, or on a new one if that one is lost."""
        held = self._open.get(dsn)
        if held is not None:
            try:
                return question(held)
            except psycopg.OperationalError:
                if not held.closed:
                    raise
        # Never prepared: what is asked again may have been altered in between.
        self._open[dsn] = psycopg.connect(dsn, autocommit=True, prepare_threshold=None)
        return question(self._open[dsn])

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


_now: ContextVar[Held | None] = ContextVar("held", default=None)


def held_now() -> Held | None:
    """What the wait holds that is going on in this thread, if there is one."""
    return _now.get()


@contextmanager
def _holding() -> Iterator[None]:
    if held_now() is not None:  # within another wait
        yield
        return
    held = Held()
    with ExitStack() as last:
        last.callback(held.close)
        last.callback(_now.reset, _now.set(held))
        yield


def until(what: str, condition: Callable[[], T], timeout_s: float = 60.0) -> T:
    """The first truthy answer of ``condition``; fails, saying ``what``, if none comes in time.

    The time is for a machine that has much else to do.
    """
    deadline = time.monotonic() + timeout_s
    with _holding():
        while True:
            asked = time.monotonic()
            answer = condition()
            if answer:
                return answer
            answered = time.monotonic()
            if answered >= deadline:
                raise AssertionError(f"waited {timeout_s:.0f} s for {what}; last answer {answer!r}")
            # An expensive question must not slow down what it waits for.
            time.sleep(min(max(_PAUSE_MIN_S, 2 * (answered - asked)), _PAUSE_MAX_S))
