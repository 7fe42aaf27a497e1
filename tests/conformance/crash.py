"""A process death at a chosen step of a sink that writes to disk, inside this process.

The steps are the calls that change the disk. ``Killed`` is no ``Exception``, so no recovery code
runs on its way out; what is left on the disk is what a killed process leaves.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

STEPS = ("mkdir", "write", "fsync", "fdatasync", "replace", "truncate", "unlink")


class Killed(BaseException):
    """The process died here."""


@contextmanager
def death_at(step: int, *, torn: bool) -> Iterator[None]:
    """Die at the ``step``-th call: before it, or, for a write, in the middle of it (``torn``)."""
    remaining = step

    def count(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                if torn and name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                elif torn:
                    call(*args, **kwargs)
                raise Killed
            return call(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, count(name, getattr(os, name)))
        yield


@contextmanager
def disk_that_fills_up(*, at_write: int) -> Iterator[None]:
    """From that write on the disk has no room: half of the bytes go in, then none."""
    write = os.write
    writes = 0

    def full(descriptor: int, data: memoryview) -> int:
        nonlocal writes
        writes += 1
        if writes == at_write:
            return write(descriptor, data[: len(data) // 2])
        if writes > at_write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        yield


@contextmanager
def recorded_steps() -> Iterator[list[tuple[str, str]]]:
    """The calls that change the disk, in order, each with the file it was about."""
    steps: list[tuple[str, str]] = []

    def record(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            target = args[-1] if name == "replace" else args[0]
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
            result = call(*args, **kwargs)
            steps.append((name, os.fspath(path)))
            return result

        return recorded

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, record(name, getattr(os, name)))
        yield steps
