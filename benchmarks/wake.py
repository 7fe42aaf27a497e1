"""How long after a batch stands in the log the body of its micro-batch begins.

A log is written by hand, a batch at a time with random gaps, while the query of a lane follows it;
the body only notes when it was called and for which batches. What Spark does between two
micro-batches is in the figures, what a lane does with a batch is not.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from benchmarks.sizes import Sizes, progress
from cdc.config import Service, Spark
from cdc.errors import TransientError
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from cdc.replication.seal import Sealer
from cdc.replication.stop import StopSignal
from cdc.service.logs import configure_logs
from spark_pipeline.delivery import Origin
from spark_pipeline.exchange import Exchange
from spark_pipeline.lane import Lane
from spark_pipeline.post import Post
from spark_pipeline.session import open_session
from spark_pipeline.settings import LaneSettings
from tests import pgoutput

_GAP_MIN_S, _GAP_MAX_S = 0.02, 0.3
_WARM_UP_S = 15.0
_ROWS = 10
_SEED = 1
_GRACE_S = 60.0
_TABLE = pgoutput.relation(1, "public", "orders", [("id", 20, True), ("note", 25)])
_ENVELOPE = struct.pack(">cQQq", b"w", 0, 0, 0)


def run(sizes: Sizes) -> dict[str, object]:
    """In a process of its own: the JVM that Spark starts ends with it."""
    with tempfile.TemporaryDirectory(prefix="walbrook-wake-") as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", "benchmarks.wake", str(result), str(sizes.seconds)]
        timeout_s = sizes.seconds + _WARM_UP_S + 2 * _GRACE_S
        # What the JVM writes to standard output is no result.
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=timeout_s)
        figures: dict[str, object] = orjson.loads(result.read_bytes())
    return figures


@dataclass
class Calls:
    """What a lane's passage is to its query: where to begin, and the body."""

    exchange: Exchange
    history: int
    next_batch: int = 0
    begun_at: dict[int, float] = field(default_factory=dict)

    def take(self, _markers: object, _batch_id: int) -> None:
        now = time.time()
        if (planned := self.exchange.planned()) is not None:
            self.begun_at |= dict.fromkeys(range(planned.start, planned.end), now)


class HandWritten:
    """A log whose batches are transactions of a few rows."""

    def __init__(self, directory: Path) -> None:
        self._writer = LogWriter(directory)
        self._sealer = Sealer()
        self.sealed_at: list[float] = []

    def append(self) -> None:
        number = len(self.sealed_at) + 1
        lsn, now_us = number * 1000, time.time_ns() // 1000
        messages = [
            *([_TABLE] if number == 1 else []),
            pgoutput.begin(lsn, now_us, number),
            *(pgoutput.insert(1, [str(lsn + row), "a note"]) for row in range(_ROWS)),
            pgoutput.commit(lsn, lsn + 8, now_us),
        ]
        sealed = self._sealer.seal([_ENVELOPE + message for message in messages])
        assert sealed is not None
        self._writer.append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)
        self.sealed_at.append(time.time())

    def close(self) -> None:
        self._writer.close()


def measure(directory: Path, seconds: int) -> dict[str, object]:
    """Warm up, then append for ``seconds``."""
    settings = _settings(directory)
    with closing(HandWritten(settings.log_directory)) as log:
        log.append()
        spark = open_session(Spark(checkpoint_directory=directory / "spark"))
        exchange = Exchange.create(directory / "exchange")
        with closing(LogView(settings.log_directory)) as view:
            calls = Calls(exchange, view.history())
        lane = Lane(spark, settings, StopSignal(), Post(()))
        query = lane.start(calls, exchange, directory / "checkpoint")
        try:
            _wait(calls, log)
            gaps = random.Random(_SEED)
            _append_for(log, _WARM_UP_S, gaps)
            _wait(calls, log)
            first = len(log.sealed_at)
            progress(f"wake: batches for {seconds} s")
            _append_for(log, seconds, gaps)
            _wait(calls, log)
        finally:
            query.stop()
            exchange.remove()
            spark.stop()
    begun_at = [calls.begun_at[batch] for batch in range(first, len(log.sealed_at))]
    waits_ms = (np.array(begun_at) - np.array(log.sealed_at[first:])) * 1000
    return {
        "batches": len(waits_ms),
        "micro_batches": len(set(begun_at)),
        **{f"p{p}_ms": round(float(np.percentile(waits_ms, p)), 1) for p in (50, 95, 99)},
        "max_ms": round(float(waits_ms.max()), 1),
    }


def _settings(directory: Path) -> LaneSettings:
    spark = Spark()
    return LaneSettings(
        source="wake",
        term=1,
        origin=Origin("wake", "localhost", "wake"),
        consumers=[],
        state_dsn="",
        log_directory=directory / "log",
        checkpoint_directory=directory / "spark",
        micro_batch_rows=spark.micro_batch_rows,
        micro_batch_bytes=spark.micro_batch_bytes,
        micro_batch_target_ms=spark.micro_batch_target_ms,
    )


def _append_for(log: HandWritten, seconds: float, gaps: random.Random) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(gaps.uniform(_GAP_MIN_S, _GAP_MAX_S))
        log.append()


def _wait(calls: Calls, log: HandWritten) -> None:
    """Until the body was called for all that was written."""
    deadline = time.monotonic() + _GRACE_S
    while len(calls.begun_at) < len(log.sealed_at):
        if time.monotonic() > deadline:
            raise TransientError(
                f"the body was called for {len(calls.begun_at)} of {len(log.sealed_at)} batches"
            )
        time.sleep(_GAP_MIN_S)


if __name__ == "__main__":
    configure_logs(Service(log_level="warning"))
    answer = Path(sys.argv[1])
    answer.write_bytes(orjson.dumps(measure(answer.parent, int(sys.argv[2]))))
