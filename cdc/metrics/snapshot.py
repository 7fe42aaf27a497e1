"""A process's metrics as a file, written every two seconds and replaced as a whole.

What cannot be written is left out: metrics never stop the work. The file of a process that has
ended stays until its successor writes: its counts go on to be shown, its levels do not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import orjson
import structlog

from cdc.metrics.catalogue import ALL
from cdc.metrics.cells import Distribution
from cdc.metrics.clock import read_clocks

_logger = structlog.get_logger("walbrook.metrics")

FILE_VARIABLE: Final = "WALBROOK_METRICS_FILE"
"""The environment variable by which the supervisor names the file of a process."""
_PACE_S: Final = 2.0
_OLD_S: Final = 30.0
_SUFFIX: Final = ".json"

Value = float | list[float]
"""Of a distribution the counts between its bounds, and its sum behind them."""


@dataclass(frozen=True)
class MetricsSnapshot:
    """What one process had counted; ``is_old``: nothing has come from it for a while."""

    series: Mapping[str, list[tuple[tuple[str, ...], Value]]]
    is_old: bool


def begin_directory(scratch: Path) -> Path:
    """An empty folder for the files of a service, below its scratch folder."""
    directory = scratch / "metrics"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in directory.glob(f"*{_SUFFIX}"):
        file.unlink(missing_ok=True)
    return directory


def file_of(directory: Path, process: str) -> Path:
    """Where a process of this name writes."""
    return directory / f"{quote(process, safe='')}{_SUFFIX}"


def begin_snapshots() -> None:
    """Write this process's metrics from now on, if the supervisor has named a file."""
    file = os.environ.get(FILE_VARIABLE)
    if file:
        threading.Thread(target=_write_on, args=(Path(file),), name="metrics", daemon=True).start()


def _write_on(file: Path) -> None:
    while True:
        time.sleep(_PACE_S)
        try:
            write_snapshot(file)
        except OSError as error:
            if not file.parent.exists():
                return  # the supervisor is gone, and with it who would read
            _logger.debug("metrics.not_written", error=str(error))


def write_snapshot(file: Path) -> None:
    """Replace the file."""
    read_clocks()
    series = {family.name: [*_values_of(family.cells)] for family in ALL if family.cells}
    new = file.with_suffix(".new")
    new.write_bytes(orjson.dumps(series))
    new.replace(file)


def _values_of(cells: Mapping[tuple[str, ...], object]) -> Iterator[tuple[tuple[str, ...], Value]]:
    for labels, cell in list(cells.items()):
        if isinstance(cell, Distribution):
            yield labels, [*cell.counts, cell.total]
        else:
            value = getattr(cell, "value", None)
            if value is not None:
                yield labels, value


def read_snapshots(directory: Path) -> list[MetricsSnapshot]:
    """Those of all processes; one that is being replaced, or does not read, is left out."""
    found = []
    for file in sorted(directory.glob(f"*{_SUFFIX}")):
        with suppress(OSError, orjson.JSONDecodeError):
            age_s = time.time() - file.stat().st_mtime
            series = orjson.loads(file.read_bytes())
            found.append(
                MetricsSnapshot(
                    {
                        name: [(tuple(labels), value) for labels, value in values]
                        for name, values in series.items()
                    },
                    is_old=age_s > _OLD_S,
                )
            )
    return found
