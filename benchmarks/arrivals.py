"""When each change arrived at its destination: seen from outside, in what the destination holds.

The row carries a key and a version that grows by one with each change of it, so that what is lost,
repeated or out of order shows. The commit's time comes with the change, from the same machine's
clock. Invariant: a change counts as arrived when a reader could see it, never
before.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow.parquet as pq
import redis

_LOOK_S = 0.01
_BLOCK_MS, _READ_MAX = 200, 10_000


@dataclass(frozen=True)
class SeenChanges:
    """Changes in the order they arrived; times are seconds since 1970."""

    keys: npt.NDArray[np.int64]
    versions: npt.NDArray[np.int64]
    committed_s: npt.NDArray[np.float64]
    arrived_s: npt.NDArray[np.float64]

    def latencies_ms(self, since_s: float, until_s: float) -> npt.NDArray[np.float64]:
        """Those of the changes that were committed within a time."""
        within = (self.committed_s >= since_s) & (self.committed_s < until_s)
        return (self.arrived_s[within] - self.committed_s[within]) * 1000

    def flaws(self, written: Mapping[int, int]) -> dict[str, int]:
        """What is wrong with it, if each key was ``written`` in all versions up to a last one."""
        missing = dict(written)
        disordered = repeated = 0
        last: dict[int, int] = {}
        for key, version in zip(self.keys.tolist(), self.versions.tolist(), strict=True):
            before = last.get(key, 0)
            if version <= before:
                repeated += 1
                continue
            disordered += version > before + 1
            last[key] = version
            missing[key] = missing.get(key, 0) - 1
        return {
            "lost": sum(abs(count) for count in missing.values()),
            "out_of_order": disordered,
            "repeated": repeated,
        }


class DestinationArrivals:
    """Takes note of messages one by one; any thread may ask what has arrived."""

    def __init__(self) -> None:
        self._keys, self._versions = array("q"), array("q")
        self._committed, self._arrived = array("d"), array("d")

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, record: Any, metadata: Any, arrived_s: float) -> None:
        """A message by its ``record`` and its ``metadata``."""
        self._keys.append(record["id"])
        self._versions.append(record["version"])
        self._committed.append(datetime.fromisoformat(metadata["commit_timestamp"]).timestamp())
        self._arrived.append(arrived_s)

    def seen(self) -> SeenChanges:
        # The last column is the last that grows: what it has, all have.
        count = len(self._arrived)
        return SeenChanges(
            np.frombuffer(self._keys[:count].tobytes(), np.int64),
            np.frombuffer(self._versions[:count].tobytes(), np.int64),
            np.frombuffer(self._committed[:count].tobytes(), np.float64),
            np.frombuffer(self._arrived[:count].tobytes(), np.float64),
        )


class Destination(Protocol):
    """Where the changes of one sink arrive."""

    def count(self) -> int:
        """How many have arrived; a repeated one counts again."""
        ...

    def seen(self) -> SeenChanges: ...


class _Follower:
    """Looks at a destination again and again in a thread, from ``with`` to its end."""

    def __init__(self) -> None:
        self._arrivals = DestinationArrivals()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def count(self) -> int:
        return len(self._arrivals)

    def seen(self) -> SeenChanges:
        return self._arrivals.seen()

    def _look(self) -> None:
        """Note what has come since the last look."""
        raise NotImplementedError

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()


class StreamFollower(_Follower):
    """A client of a Redis stream."""

    def __init__(self, client: redis.Redis, stream: str) -> None:
        super().__init__()
        self._client, self._stream = client, stream
        self._position: bytes | str = "0"

    def _look(self) -> None:
        asked: Any = {self._stream: self._position}
        answer = cast(Any, self._client.xread(asked, count=_READ_MAX, block=_BLOCK_MS))
        arrived_s = time.time()
        for _, entries in answer:
            for _, fields in entries:
                record, metadata = (orjson.loads(fields[name]) for name in (b"record", b"metadata"))
                self._arrivals.add(record, metadata, arrived_s)
            self._position = entries[-1][0]


class FileFollower(_Follower):
    """One who reads the lines of a file sink as they are written."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._read: dict[Path, int] = {}

    def _look(self) -> None:
        for path in sorted(self._directory.glob("changes-*.jsonl")):
            start = self._read.get(path, 0)
            if path.stat().st_size == start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                new = file.read()
            arrived_s = time.time()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = start + len(whole)
            self._add(whole.splitlines(), arrived_s)
        self._stop.wait(_LOOK_S)

    def _add(self, lines: Iterable[bytes], arrived_s: float) -> None:
        for line in lines:
            message = orjson.loads(line)
            self._arrivals.add(message["record"], message["metadata"], arrived_s)


class ParquetFolder:
    """Files that are put in their place whole; the file system says when."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def count(self) -> int:
        return sum(pq.read_metadata(path).num_rows for path in self._files())

    def seen(self) -> SeenChanges:
        arrivals = DestinationArrivals()
        for path in self._files():
            rows = pq.read_table(path, columns=["record", "commit_timestamp"], partitioning=None)
            arrived_s = path.stat().st_ctime
            for row in rows.to_pylist():
                committed = {"commit_timestamp": row["commit_timestamp"].isoformat()}
                arrivals.add(orjson.loads(row["record"]), committed, arrived_s)
        return arrivals.seen()

    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("table=*/**/*.parquet"))
