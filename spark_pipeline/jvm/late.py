"""A Spark session that is opened while others already work: it takes seconds.

Invariant: once the session is there, or has failed to open, that does not change any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from pyspark.sql import SparkSession

_LOOK_S = 0.1  # how often a waiting thread sees that the session is not wanted any more


class LateSession:
    """All methods may be called from any thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._session: SparkSession | None = None
        self.failure: Exception | None = None

    @classmethod
    def of(cls, session: SparkSession) -> Self:
        """One that is open already."""
        late = cls()
        late._session = session
        late._done.set()
        return late

    def open(self, open_session: Callable[[], SparkSession]) -> None:
        """Open it, in the caller's thread; what goes wrong is kept in ``failure``."""
        try:
            self._session = open_session()
        except Exception as error:
            self.failure = error
        self._done.set()

    @property
    def current(self) -> SparkSession | None:
        """The session, if it is open."""
        return self._session

    def wait(
        self, given_up: Callable[[], bool], came: Callable[[], None] = lambda: None
    ) -> SparkSession | None:
        """Wait for the session; None if it failed to open, or if it is not wanted any more.

        ``came`` is called if it had to be waited for.
        """
        if self._done.is_set():
            return self._session
        while not self._done.wait(_LOOK_S):
            if given_up():
                return None
        came()
        return self._session
