"""The reader under measurement: its own process on a slot of its own, and the log it writes."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.processes import ProcessMeter
from benchmarks.service import write_config
from benchmarks.source import PUBLICATION, BenchmarkSource
from benchmarks.watched import WatchedProgram
from cdc.config import load as load_config
from cdc.errors import TransientError
from cdc.log.view import LogView
from cdc.service.process.prepare import prepare

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class MeasuredReader:
    """A reader that streams; ``meter`` has its CPU and memory once the block is left."""

    view: LogView
    program: WatchedProgram
    meter: ProcessMeter

    def wait_for_rows(self, rows: int) -> float:
        """When the log held that many rows, by ``perf_counter``."""
        deadline = time.perf_counter() + _TIMEOUT_S
        seen = found = 0
        while found < rows:
            end = self.view.wait(seen, timeout_s=1.0)
            found += int(self.view.entries(seen, end)["rows"].sum())
            seen = end
            self.program.require_running()
            if time.perf_counter() > deadline:
                raise TransientError(f"the reader wrote {found} of {rows} rows in {_TIMEOUT_S:g} s")
        return time.perf_counter()


@contextmanager
def measured_reader(
    directory: Path,
    source: BenchmarkSource,
    slot: str,
    *,
    publication: str = PUBLICATION,
    durability: str = "disk",
    database: Mapping[str, object] | None = None,
) -> Iterator[MeasuredReader]:
    """A reader of ``slot`` with its log below ``directory``, which is removed at the end."""
    path = write_config(
        directory,
        source,
        name=slot,
        slot=slot,
        durability=durability,
        publication=publication,
        database=database,
    )
    term = prepare(load_config(path))[slot]
    view = LogView(directory / "log" / slot)
    command = [sys.executable, "-m", "cdc.replication", str(path), slot, f"--term={term}"]
    try:
        with WatchedProgram(command, begins="reader.streaming") as program:
            program.wait_begun()
            process = psutil.Process(program.process.pid)
            with ProcessMeter(lambda: [("reader", process)]) as meter:
                yield MeasuredReader(view, program, meter)
    finally:
        view.close()
        shutil.rmtree(directory)
