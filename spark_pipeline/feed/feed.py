"""The ring of decoded ranges between the body of ``foreachBatch`` and the workers.

The body appends ranges at the end; each worker takes the range that holds its next batch. Small
ranges that follow it come with it as one: a worker whose deliveries take longer than those of the
fastest delivers more at a time, and keeps up. A worker that needs an older batch than the ring
holds is behind, and reads the log itself.

Invariants: ranges follow each other without a gap and end at batch boundaries. A range leaves the
ring when every worker in the feed has passed it, and is closed when no worker delivers from it. The
ring is bounded in bytes and in ranges that executors decoded. While it is full the body waits, as
long as no worker is starved; once one has been starved for ``patience_s``, the oldest range is
dropped, and the workers that still need it are behind.

All methods may be called from any thread; ``begin``, ``put``, ``skip`` and ``fail`` are the body's.
One lock guards everything, and nothing is waited for while it is held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError, WalbrookError
from spark_pipeline.feed.decoded_range import DecodedRange

_LOOK_S = 0.2
_JOINED_ROWS_MAX = 1_000
_JOINED_BYTES_MAX = 4 << 20


class BehindError(TransientError):
    """A worker needs a batch that the feed does not hold any more."""

    def __init__(self) -> None:
        super().__init__("the feed is past this batch")


@dataclass
class _FeedReader:
    """A worker in the feed."""

    batch: int  # the next it needs
    signal: threading.Event | None = None  # set when it may have something to do
    delivering: bool = False


@dataclass(frozen=True)
class FeedDepth:
    """How much lies in the feed."""

    ranges: int
    bytes: int


@dataclass
class _Kept:
    """A range in the ring, or one that a worker still delivers from."""

    decoded: DecodedRange
    users: int = 0
    dropped: bool = False


@dataclass
class Feed:
    """``bytes_max`` bounds what lies in it, ``large_max`` the ranges that executors decoded."""

    bytes_max: int
    large_max: int = 2
    patience_s: float = 1.0
    history: int = 0
    position: int = 0
    """The first batch that is not in the feed yet."""
    high: Cursor = ORIGIN
    """Everything below was read."""
    is_filled: bool = False
    """Whether a query is running that brings ranges: until then workers read the log."""
    _ring: deque[_Kept] = field(default_factory=deque)
    _readers: dict[str, _FeedReader] = field(default_factory=dict)
    _failed: tuple[int, WalbrookError] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False
    _open: list[DecodedRange] = field(default_factory=list)  # all that are not closed yet
    _unused: list[DecodedRange] = field(default_factory=list)  # to be closed outside the lock

    def __post_init__(self) -> None:
        self._arrived = threading.Condition(self._lock)  # workers wait for it
        self._passed = threading.Condition(self._lock)  # the body waits for it

    def begin(self, history: int, position: int, high: Cursor) -> None:
        """Go on from a batch of the log; another history, or another place, empties the ring."""
        with self._lock:
            self._notify()
            if (history, position) != (self.history, self.position):
                self._drop_all()
                self._readers.clear()  # their batches may be of another history: they join again
            self.history, self.position, self.high = history, position, high
            self._failed = None
        self._close_unused()

    def demand(self) -> int | None:
        """The lowest batch from the feed's end on that a worker needs; None without workers."""
        with self._lock:
            needed = [max(reader.batch, self.position) for reader in self._readers.values()]
            return min(needed, default=None)

    @property
    def readers(self) -> list[str]:
        """The workers in the feed."""
        with self._lock:
            return list(self._readers)

    @property
    def lowest(self) -> int:
        """The first batch that a worker in the feed has not passed."""
        with self._lock:
            return min((reader.batch for reader in self._readers.values()), default=self.position)

    @property
    def is_busy(self) -> bool:
        """Whether a worker in the feed delivers, or has something to deliver."""
        with self._lock:
            readers = self._readers.values()
            return any(each.delivering or each.batch < self.position for each in readers)

    def wait_for_idle(self, wait_s: float) -> bool:
        """Until a worker has passed all that the feed has, or none is in it, or for a while.

        Returns whether there was anything to wait for.
        """
        with self._lock:
            if self._has_idle():
                return False
            self._passed.wait_for(self._has_idle, wait_s)
            return True

    @property
    def depth(self) -> FeedDepth:
        with self._lock:
            return FeedDepth(len(self._ring), self._bytes())

    def has_rows(self, worker: str) -> bool:
        """Whether a range with changes waits for a worker in the feed."""
        with self._lock:
            reader = self._readers.get(worker)
            return reader is not None and any(
                kept.decoded.rows and kept.decoded.end > reader.batch for kept in self._ring
            )

    def put(self, decoded: DecodedRange, given_up: threading.Event) -> None:
        """Append a range; waits for room. ``given_up`` ends the wait, and the range is dropped."""
        starved_since: float | None = None
        with self._lock:
            while not self._has_room(decoded) and not given_up.is_set() and not self._closed:
                # Nothing is appended meanwhile: who has nothing to do now will have nothing later.
                now = time.monotonic()
                starved_since = (starved_since or now) if self._has_idle() else None
                if starved_since is not None and now - starved_since >= self.patience_s:
                    self._drop_oldest()
                    continue
                self._passed.wait(min(_LOOK_S, self.patience_s))
            if given_up.is_set() or self._closed:
                self._unused.append(decoded)
            else:
                self._ring.append(_Kept(decoded))
                self._open.append(decoded)
                self.position, self.high = decoded.end, decoded.high
                self._notify()
        self._close_unused()

    def skip(self, position: int, high: Cursor) -> None:
        """No worker in the feed needs the batches below ``position``."""
        with self._lock:
            self._drop_all()
            self.position, self.high = position, max(self.high, high)
            self._notify()
        self._close_unused()

    def fail(self, error: WalbrookError) -> None:
        """The next batch cannot be decoded: its readers read the log themselves."""
        with self._lock:
            self._failed = (self.position, error)
            self._notify()

    def join(
        self, worker: str, history: int, batch: int, signal: threading.Event | None = None
    ) -> bool:
        """Take part from ``batch`` on; returns whether the feed has it, or will have it.

        ``signal`` is set whenever the worker may have something to do, for one with several feeds.
        """
        with self._lock:
            first = self._ring[0].decoded.start if self._ring else self.position
            failed = self._failed is not None and batch <= self._failed[0]
            if history != self.history or batch < first or failed or self._closed:
                return False
            if worker not in self._readers:
                self._readers[worker] = _FeedReader(batch, signal)
                self._passed.notify_all()
            return True

    def leave(self, worker: str) -> None:
        """Take part no more; again does nothing."""
        with self._lock:
            if self._readers.pop(worker, None) is not None:
                self._trim()
                self._passed.notify_all()
        self._close_unused()

    @contextmanager
    def next(self, worker: str, wait_s: float) -> Iterator[DecodedRange | None]:
        """The range with the worker's next batch; None if there is none within ``wait_s``.

        If it is small, the ranges behind it are joined to it. The worker has passed it when the
        block ends without an error. BehindError if the ring is past that batch; then the worker is
        no longer in the feed.
        """
        kept = self._take(worker, wait_s)
        if not kept:
            yield None
            return
        try:
            yield DecodedRange.joined([each.decoded for each in kept])
        except BaseException:
            self._done(worker, kept, passed=False)
            raise
        self._done(worker, kept, passed=True)

    @property
    def files(self) -> set[str]:
        """The files in which decoded rows lie that a worker may still deliver."""
        with self._lock:
            return {piece.path for decoded in self._open for piece in decoded.slices}

    def wake(self) -> None:
        """End every wait of a worker."""
        with self._lock:
            self._notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._notify()
            self._drop_all()
            self._readers.clear()
            self._passed.notify_all()
        self._close_unused()

    def _notify(self) -> None:
        self._arrived.notify_all()
        for reader in self._readers.values():
            if reader.signal is not None:
                reader.signal.set()

    def _take(self, worker: str, wait_s: float) -> list[_Kept]:
        try:
            with self._lock:
                reader = self._readers.get(worker)
                if reader is None:
                    raise BehindError
                kept = self._find(worker, reader)
                if not kept and wait_s > 0:
                    self._passed.notify_all()  # the body may wait for a worker without work
                    self._arrived.wait(wait_s)
                    kept = self._find(worker, reader)
                for each in kept:
                    each.users += 1
                    reader.delivering = True
                return kept
        finally:
            self._close_unused()

    def _find(self, worker: str, reader: _FeedReader) -> list[_Kept]:
        """The range with the worker's next batch and those that come with it; none if it waits."""
        if self._closed or worker not in self._readers:
            raise BehindError
        for at, kept in enumerate(self._ring):
            if kept.decoded.start <= reader.batch < kept.decoded.end:
                return self._joinable(at)
        if self._failed is not None and reader.batch <= self._failed[0]:
            self._remove(worker)
            raise self._failed[1]
        if reader.batch >= self.position:
            return []
        self._remove(worker)
        raise BehindError

    def _joinable(self, at: int) -> list[_Kept]:
        """The range at a place of the ring, and those behind it that may come with it."""
        found: list[_Kept] = []
        rows = size = 0
        for kept in islice(self._ring, at, None):
            decoded = kept.decoded
            rows, size = rows + decoded.rows, size + decoded.size
            small = rows <= _JOINED_ROWS_MAX and size <= _JOINED_BYTES_MAX
            if found and not (small and decoded.plan.in_driver):
                break
            found.append(kept)
            if not decoded.plan.in_driver:
                break
        return found

    def _remove(self, worker: str) -> None:
        del self._readers[worker]
        self._trim()
        self._passed.notify_all()

    def _done(self, worker: str, taken: list[_Kept], *, passed: bool) -> None:
        with self._lock:
            reader, last = self._readers.get(worker), taken[-1].decoded
            if reader is not None:
                reader.delivering = False
                if passed and last.history == self.history:
                    reader.batch = max(reader.batch, last.end)
            for kept in taken:
                kept.users -= 1
                if kept.dropped and not kept.users:
                    self._unused.append(kept.decoded)
            self._trim()
            self._passed.notify_all()
        self._close_unused()

    def _trim(self) -> None:
        """Drop what every worker in the feed has passed."""
        lowest = min((r.batch for r in self._readers.values()), default=self.position)
        while self._ring and self._ring[0].decoded.end <= lowest:
            self._drop_oldest()

    def _has_idle(self) -> bool:
        readers = self._readers.values()
        return not readers or any(
            not each.delivering and each.batch >= self.position for each in readers
        )

    def _has_room(self, decoded: DecodedRange) -> bool:
        if not self._ring:
            return True
        large = sum(not kept.decoded.plan.in_driver for kept in self._ring)
        if not decoded.plan.in_driver and large >= self.large_max:
            return False
        return self._bytes() + decoded.size <= self.bytes_max

    def _bytes(self) -> int:
        return sum(kept.decoded.size for kept in self._ring if kept.decoded.plan.in_driver)

    def _drop_oldest(self) -> None:
        kept = self._ring.popleft()
        kept.dropped = True
        if not kept.users:
            self._unused.append(kept.decoded)

    def _close_unused(self) -> None:
        with self._lock:
            unused, self._unused = self._unused, []
            self._open = [decoded for decoded in self._open if decoded not in unused]
        for decoded in unused:
            decoded.close()

    def _drop_all(self) -> None:
        while self._ring:
            self._drop_oldest()
