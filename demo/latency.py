"""From commit to arrival, seen from outside: when did a sink hold how much?

A thread looks at the sinks that only grow, and remembers each new size with its time. Afterwards
the size at which a message was complete tells when it was there, to within one look. A Parquet
file needs no watching: its place in the folder was given to it once, at a time that it keeps.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import orjson
import redis
from numpy.typing import NDArray

from cdc.change import READ
from demo.servers import STREAM_KEY, ExampleServers

_LOOK_S: Final = 0.005
_MANY_ROWS: Final = 1_000
Seconds = NDArray[np.float64]


class Growth:
    """Sizes that a sink had, rising, and when each was first seen."""

    def __init__(self) -> None:
        self._sizes: list[int] = [0]
        self._times: list[float] = [time.time()]

    def saw(self, size: int) -> None:
        if size > self._sizes[-1]:
            self._sizes.append(size)
            self._times.append(time.time())

    def reached(self, sizes: NDArray[np.int64]) -> Seconds:
        """When each of these sizes was reached; NaN for those that never were."""
        found = np.searchsorted(self._sizes, sizes)
        return np.append(self._times, np.nan)[found]


class ArrivalWatch:
    """Watches the files' bytes and the stream's length; a context manager."""

    def __init__(self, servers: ExampleServers) -> None:
        self.file_bytes = Growth()
        self.stream_entries = Growth()
        self._directory = servers.file_directory
        self._redis = None if servers.redis is None else redis.Redis.from_url(servers.redis.url)
        self._asked_to_stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="arrival-clock", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._asked_to_stop.set()
        self._thread.join()
        if self._redis is not None:
            self._redis.close()

    def _watch(self) -> None:
        while not self._asked_to_stop.wait(_LOOK_S):
            self.file_bytes.saw(_bytes_in(self._directory))
            if self._redis is not None:
                try:
                    self.stream_entries.saw(int(str(self._redis.xlen(STREAM_KEY))))
                except redis.RedisError:
                    return  # without figures for it; whether all arrived is judged elsewhere


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("changes-*.jsonl"))


@dataclass(frozen=True)
class Latencies:
    """From commit to arrival, in milliseconds, where the arrival is known."""

    customers: Seconds  # of each change that a customer made
    imported: Seconds  # of each row of a transaction with many


def latencies_ms(messages: list[bytes], arrived_at: Seconds, since: datetime) -> Latencies:
    """Of the changes committed at or after ``since``; rows that a backfill read are no changes."""
    parsed = [orjson.loads(message) for message in messages]
    committed: Seconds = np.array(
        [
            datetime.fromisoformat(message["metadata"]["commit_timestamp"]).timestamp()
            for message in parsed
        ],
        np.float64,
    )
    _, transaction, rows = np.unique(
        [message["metadata"]["commit_lsn"] for message in parsed],
        return_inverse=True,
        return_counts=True,
    )
    changes = np.array([message["action"] != READ for message in parsed], np.bool_)
    taken: Seconds = (arrived_at - committed) * 1000
    known = changes & (committed >= since.timestamp()) & ~np.isnan(taken)
    many = rows[transaction] >= _MANY_ROWS
    return Latencies(taken[known & ~many], taken[known & many])
