"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: str, condition: Callable[[], T], timeout_s: float = 30.0) -> T:
    """The first truthy answer of ``condition``; fails, saying ``what``, if none comes in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what}; last answer {answer!r}")
        time.sleep(0.02)
