"""How many rows a second one core decodes, and in how much memory, against a row-by-row decoder.

Four recordings of a real server's pgoutput (``recordings``), each measured by a process of its own
on one core: to typed Arrow columns, and to whole messages in the ``sequin`` shape.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import orjson
import psutil
import pyarrow as pa

from benchmarks import row_decoder
from benchmarks.recordings import loads, read_recording, record
from benchmarks.sizes import progress
from cdc.decoding import decode_changes
from cdc.decoding.shapes import Context, shape_for
from cdc.decoding.typed import decode_tables
from demo.embedded_postgres import EmbeddedPostgres

_BASELINE_FRAMES = 2
_SOURCE = {
    "database_name": "main",
    "consumer": {"name": "orders"},
    "database": {"name": "main", "database": "shop", "hostname": "localhost"},
}
Frames = list[pa.RecordBatch]
Schemas = Mapping[int, bytes]
Step = Callable[[pa.RecordBatch], object]


def run() -> dict[str, object]:
    """Record, then measure each recording; the figures of ``orders`` also stand for the whole."""
    figures: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="walbrook-decode-") as directory:
        with EmbeddedPostgres(Path(directory) / "postgres", fast=True) as postgres:
            for name, load in loads().items():
                progress(f"recording {name}")
                record(postgres.dsn, load, Path(directory) / f"{name}.arrow")
        for name in loads():
            progress(f"decoding {name}")
            figures[name] = _measured(Path(directory) / f"{name}.arrow")
    return {**figures["orders"], "recordings": figures}


def _measured(path: Path) -> dict[str, object]:
    """Every measure by a process of its own: what one leaves in memory is not the next one's."""
    figures: dict[str, object] = {}
    for measure in MEASURES:
        command = [sys.executable, "-m", "benchmarks.decode", str(path), measure]
        answer = subprocess.run(command, check=True, capture_output=True, timeout=600).stdout
        figures |= orjson.loads(answer)
    return figures


def _speed(frames: Frames, schemas: Schemas) -> dict[str, object]:
    """Medians of 3 on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = sum(frame.num_rows for frame in frames)
    to_messages = _rows_per_s(lambda frame: _messages(frame, schemas), frames)
    by_row = _rows_per_s(
        lambda frame: row_decoder.write_messages(frame, schemas, _SOURCE),
        frames[:_BASELINE_FRAMES],
    )
    return {
        "rows": rows,
        "bytes_per_row": round(_bytes(frames) / rows),
        "rows_per_s_arrow": _rows_per_s(lambda frame: _arrow(frame, schemas), frames),
        "rows_per_s_changes": _rows_per_s(lambda frame: decode_changes(frame, schemas), frames),
        "rows_per_s_messages": to_messages,
        "baseline_rows_per_s": by_row,
        "speedup": round(to_messages / by_row, 1),
    }


def _arrow_memory(frames: Frames, schemas: Schemas) -> dict[str, object]:
    return {"memory_of_input_arrow": _memory(lambda frame: _arrow(frame, schemas), frames)}


def _messages_memory(frames: Frames, schemas: Schemas) -> dict[str, object]:
    return {"memory_of_input_messages": _memory(lambda frame: _messages(frame, schemas), frames)}


def _memory_at_once(frames: Frames, schemas: Schemas) -> dict[str, object]:
    whole = [pa.concat_batches(frames)]
    return {"memory_at_once_arrow": _memory(lambda frame: _arrow(frame, schemas), whole)}


MEASURES: dict[str, Callable[[Frames, Schemas], dict[str, object]]] = {
    "speed": _speed,
    "arrow_memory": _arrow_memory,
    "messages_memory": _messages_memory,
    "memory_at_once": _memory_at_once,
}


def _arrow(frame: pa.RecordBatch, schemas: Schemas) -> object:
    return list(decode_tables(frame, schemas))


def _messages(frame: pa.RecordBatch, schemas: Schemas) -> pa.StringArray:
    shape = shape_for("sequin", Context("orders", "main", "localhost", "shop", now_ns=0))
    return shape.messages(shape.rows(decode_changes(frame, schemas)))


def _rows_per_s(step: Step, frames: Frames) -> int:
    rows: int = sum(frame.num_rows for frame in frames)
    step(frames[0])
    rates: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        for frame in frames:
            step(frame)
        rates.append(rows / (time.perf_counter() - start))
    return round(median(rates))


def _memory(step: Step, frames: Frames) -> float:
    """The most memory that decoding took beyond what was there, as a multiple of the input."""
    step(frames[0].slice(0, 10))  # what is loaded once is not the decoder's
    before = int(psutil.Process().memory_info().rss)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    for frame in frames:
        step(frame)
    return round(max(0, _peak_rss() - before) / _bytes(frames), 2)


def _bytes(frames: Frames) -> int:
    return sum(frame.column("payload").nbytes for frame in frames)


def _peak_rss() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(orjson.dumps(MEASURES[sys.argv[2]](*read_recording(Path(sys.argv[1])))).decode())
