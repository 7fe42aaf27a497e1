"""Open views for a process of many threads.

A view is not for two threads at once, and opening one reads the manifest: so they are kept, a few,
and each is lent to one call at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cdc.log.view import LogView

_IDLE_MAX = 16


class ViewPool:
    """Open views, each lent to one call at a time: a view is not for two threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Path, int, LogView]] = []

    @contextmanager
    def lent(self, directory: Path, history: int) -> Iterator[LogView]:
        view = self._take(directory, history) or LogView(directory, history=history)
        try:
            yield view
        except BaseException:
            # What failed, or was left in mid-stream, is reopened.
            view.close()
            raise
        if history:
            self._give_back(directory, history, view)
        else:
            # It has settled for the history it found, which the next caller need not want.
            view.close()

    def close(self) -> None:
        with self._lock:
            for _directory, _history, view in self._idle:
                view.close()
            self._idle.clear()

    def _take(self, directory: Path, history: int) -> LogView | None:
        with self._lock:
            for position, (of, at, view) in enumerate(self._idle):
                if (of, at) == (directory, history):
                    del self._idle[position]
                    return view
        return None

    def _give_back(self, directory: Path, history: int, view: LogView) -> None:
        with self._lock:
            self._idle.append((directory, history, view))
            if len(self._idle) > _IDLE_MAX:
                self._idle.pop(0)[2].close()
