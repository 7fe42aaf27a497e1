"""How many rows a second one core brings into the order of event time, and in how much memory.

Last, the whole way: a service catches up on rows through a consumer in event-time order into files.

Batches with the columns of a decoded change go through the tracker and the buffer (push and step).
Their times are out of order by more than a batch, so that some thousands of rows always wait. That
part needs no server: what is measured is the pure core, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import orjson
import psutil
import pyarrow as pa

from benchmarks.catch_up import (
    catch_up,
    file_target,
    in_event_time,
    make_warm,
    require_whole,
    service_of,
)
from benchmarks.processes import cpu_s
from benchmarks.service import OWN_ROLES
from benchmarks.sizes import Sizes, progress
from benchmarks.source import open_source
from cdc.change import CHANGE_SCHEMA
from cdc.cursor import ORIGIN, Cursor
from cdc.eventtime import NO_TIME, Codes, Times, types
from cdc.eventtime.buffer import BYTES_MAX
from cdc.eventtime.sequencer import SavedPosition, Sequencer
from cdc.eventtime.tracker import WatermarkTracker

_BATCH_ROWS = 10_000
_BATCHES = 100
_PARTITIONS = 100
_ROUNDS = 3
_EVENT_US = 1_000  # an event a millisecond
_DISORDER_US = 4_000 * _EVENT_US
_TOLERANCE_US = 4_000 * _EVENT_US
_START_US = 1_790_000_000_000_000
_NEVER_US = 1 << 50
_RECORD_BYTES = 150


class Batch(NamedTuple):
    rows: pa.RecordBatch
    times: Times
    codes: Codes
    read: Cursor


class EventTimeRun(NamedTuple):
    rows_per_s: float  # that left
    cpu_ns_per_row: float
    waiting: float  # rows, on average


def run(sizes: Sizes) -> dict[str, object]:
    """The core, then the whole way with ``sizes.rows`` rows."""
    return core_figures() | catch_up_figures(sizes)


def catch_up_figures(sizes: Sizes) -> dict[str, object]:
    """A service catches up, as in ``pipeline``, in the order of event time with no tolerance."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-eventtime-") as name,
        open_source(Path(name) / "postgres") as source,
    ):
        target = in_event_time(file_target(Path(name), source, "by_time"))
        with service_of(Path(name), source, target) as service:
            make_warm(source, service, target, sizes)
            measured = catch_up(source, service, target, sizes)
            warnings = service.warnings()
        progress(f"event time: caught up at {measured.rows_per_s:,.0f} rows/s")
        require_whole(target, measured)
    used_s = cpu_s(measured.processes, OWN_ROLES)
    return {
        "catch_up_rows": sizes.rows,
        "catch_up_rows_per_s": round(measured.rows_per_s),
        "catch_up_cpu_us_per_row": round(used_s * 1e6 / sizes.rows, 2),
        "warnings": warnings,
        "processes": measured.processes,
    }


def core_figures() -> dict[str, object]:
    """Each measure by a process of its own: what one leaves in memory is not the next one's."""
    figures: dict[str, object] = {}
    for measure in MEASURES:
        progress(f"event time: {measure}")
        command = [sys.executable, "-m", "benchmarks.eventtime", measure]
        answer = subprocess.run(command, check=True, capture_output=True, timeout=600).stdout
        figures |= orjson.loads(answer)
    return figures


def _order() -> dict[str, object]:
    """Rows a second through push and step, medians of 3."""
    batches = _batches(followers=0.0)
    plain = [_sequenced(batches) for _ in range(_ROUNDS)]
    with_deletes = _batches(followers=0.1)
    mixed = [_sequenced(with_deletes) for _ in range(_ROUNDS)]
    return {
        "rows": _BATCHES * _BATCH_ROWS,
        "bytes_per_row": round(batches[0].rows.nbytes / _BATCH_ROWS),
        "partitions": _PARTITIONS,
        "rows_waiting": round(median(run.waiting for run in plain)),
        "rows_per_s": round(median(run.rows_per_s for run in plain)),
        "cpu_ns_per_row": round(median(run.cpu_ns_per_row for run in plain)),
        "rows_per_s_with_deletes": round(median(run.rows_per_s for run in mixed)),
        "cpu_ns_per_row_with_deletes": round(median(run.cpu_ns_per_row for run in mixed)),
    }


def _tracking() -> dict[str, object]:
    """A batch with an event of every partition, and one of 10,000 rows; a look at all of them."""
    tracker, rng = _tracker(), np.random.default_rng(7)
    every: Codes = rng.permutation(_PARTITIONS).astype(np.int32)
    codes: Codes = rng.integers(0, _PARTITIONS, _BATCH_ROWS, np.int32)
    some = _START_US + np.arange(_PARTITIONS, dtype=np.int64)
    many = _START_US + np.arange(_BATCH_ROWS, dtype=np.int64)
    return {
        "update_ns_per_partition": round(_ns(lambda: tracker.update(every, some)) / _PARTITIONS, 1),
        "update_ns_per_row": round(_ns(lambda: tracker.update(codes, many)) / _BATCH_ROWS, 2),
        "look_us": round(_ns(tracker.look) / 1_000, 1),
    }


def _parsing() -> dict[str, object]:
    """Nanoseconds a value, from text as Postgres writes it."""
    times = _times(0)
    stamps = [f"{stamp}+00" for stamp in pa.array(times, pa.timestamp("us")).cast(pa.string())]
    columns = {
        "timestamptz": pa.array(stamps, pa.string()),
        "unix_ms": pa.array(times // 1_000).cast(pa.string()),
        "unix_s": pa.array([f"{time / 1e6:.6f}" for time in times], pa.string()),
    }
    figures: dict[str, object] = {}
    for name, column in columns.items():
        parse = partial(types.resolve(name).parse, column)
        figures[f"parse_ns_{name}"] = round(_ns(parse) / _BATCH_ROWS)
    return figures


def _memory() -> dict[str, object]:
    """What a waiting row takes beyond its Arrow data, by the process's memory."""
    batches = _batches(followers=0.0)
    sequencer = _sequencer()
    _push(sequencer, batches[:1])  # what is loaded once is not the rows'
    arrow_before, before = pa.total_allocated_bytes(), _rss()
    _push(sequencer, batches[1:])
    pa.default_memory_pool().release_unused()
    rows = (_BATCHES - 1) * _BATCH_ROWS
    arrow = pa.total_allocated_bytes() - arrow_before
    return {
        "memory_bytes_per_waiting_row": round((_rss() - before) / rows),
        "memory_beyond_arrow_per_waiting_row": round((_rss() - before - arrow) / rows),
        "counted_bytes_per_waiting_row": round(sequencer.buffer.bytes / sequencer.buffer.rows),
    }


MEASURES: dict[str, Callable[[], dict[str, object]]] = {
    "order": _order,
    "tracking": _tracking,
    "parsing": _parsing,
    "memory": _memory,
}


def _sequenced(batches: Sequence[Batch]) -> EventTimeRun:
    """Every batch pushed and a step made after it; no row may be lost."""
    sequencer = _sequencer()
    waiting, left = 0, 0
    start, cpu_start = time.perf_counter(), time.process_time()
    for batch in batches:
        sequencer.push("shop", *batch)
        step = sequencer.step()
        waiting += sequencer.buffer.rows
        left += len(step.released) if step and step.released else 0
        left += len(step.late) if step and step.late else 0
    took, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    rows = len(batches) * _BATCH_ROWS
    assert left + sequencer.buffer.rows == rows
    return EventTimeRun(left / took, cpu * 1e9 / rows, waiting / len(batches))


def _push(sequencer: Sequencer, batches: Sequence[Batch]) -> None:
    for batch in batches:
        sequencer.push("shop", *batch)


def _tracker() -> WatermarkTracker:
    tracker = WatermarkTracker(clock=lambda _source: 0, idle_timeout_us=_NEVER_US)
    for table in range(_PARTITIONS):
        tracker.register("shop", f"public.orders_{table}", tolerance_us=_TOLERANCE_US)
    return tracker


def _sequencer() -> Sequencer:
    return Sequencer({"shop": SavedPosition(ORIGIN, ORIGIN)}, _tracker(), max_bytes=BYTES_MAX)


def _batches(*, followers: float) -> list[Batch]:
    """Events in turns of all partitions; a share ``followers`` of them has no time."""
    rng = np.random.default_rng(7)
    batches: list[Batch] = []
    for at in range(_BATCHES):
        times = _times(at)
        times[rng.random(_BATCH_ROWS) < followers] = NO_TIME
        codes: Codes = rng.integers(0, _PARTITIONS, _BATCH_ROWS, np.int32)
        batches.append(Batch(_rows(at), times, codes, Cursor(at + 1, 0)))
    return batches


def _times(at: int) -> Times:
    """One event after the other, each up to the disorder too early."""
    rng = np.random.default_rng(at)
    order = np.arange(at * _BATCH_ROWS, (at + 1) * _BATCH_ROWS, dtype=np.int64)
    return _START_US + order * _EVENT_US - rng.integers(0, _DISORDER_US, _BATCH_ROWS)


def _rows(at: int) -> pa.RecordBatch:
    def text(values: Sequence[str | None]) -> pa.StringArray:
        return pa.array(values, pa.string())

    first = at * _BATCH_ROWS
    numbers = range(first, first + _BATCH_ROWS)
    none = pa.nulls(_BATCH_ROWS, pa.string())
    filler = "x" * (_RECORD_BYTES - len('{"id":12345678,"note":""}'))
    columns = {
        "commit_lsn": pa.array(np.full(_BATCH_ROWS, at, np.int64)),
        "commit_idx": pa.array(np.arange(_BATCH_ROWS)),
        "commit_timestamp": pa.array(np.full(_BATCH_ROWS, _START_US + at)).cast(
            pa.timestamp("us", tz="UTC")
        ),
        "xid": pa.array(np.full(_BATCH_ROWS, at, np.int64)),
        "table_schema": text(["public"] * _BATCH_ROWS),
        "table_name": text([f"orders_{number % _PARTITIONS}" for number in numbers]),
        "action": text(["insert"] * _BATCH_ROWS),
        "record": text([f'{{"id":{number:08},"note":"{filler}"}}' for number in numbers]),
        "record_pks": text([f'["{number}"]' for number in numbers]),
    }
    arrays = [columns.get(name, none) for name in CHANGE_SCHEMA.names]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGE_SCHEMA)


def _ns(step: Callable[[], object]) -> float:
    """Nanoseconds of a call: median of 3 means of as many calls as take a tenth of a second."""
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        step()
        calls += 1
    means: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        means.append((time.perf_counter() - start) / calls * 1e9)
    return median(means)


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    print(orjson.dumps(MEASURES[sys.argv[1]]()).decode())
