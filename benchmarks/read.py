"""How close the reader comes to what the slot can give.

The same rows are read again and again, each time through a fresh copy of one slot that no reader
moves: by ``pg_recvlogical``, by a bare psycopg loop that keeps nothing, and by the reader's own
process into the log, with both durabilities. So are rows of ten tables.
All are measured from the start of streaming: one to its end position, the other to the last row
that can be read from the log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import pyarrow.compute as pc

from benchmarks.reader import measured_reader
from benchmarks.recvlogical import receive
from benchmarks.sizes import Sizes, progress
from benchmarks.slot_drain import drain
from benchmarks.source import BenchmarkSource, WrittenRows, open_source
from benchmarks.ten_tables import create_ten_tables, load_ten_tables


@dataclass(frozen=True)
class LogReading:
    """One run of the reader over the whole load."""

    rows_per_s: float
    cpu_us_per_message: float
    peak_rss_mb: float
    row_bytes: float


@dataclass(frozen=True)
class ReadRounds:
    """Every measurement of one load."""

    name: str
    load: WrittenRows
    readings: dict[str, list[LogReading]]  # by durability
    received: list[float] = field(default_factory=list)
    drained: list[float] = field(default_factory=list)

    @property
    def slot(self) -> str:
        return f"original_{self.name}"

    def rate(self, durability: str) -> float:
        return median(reading.rows_per_s for reading in self.readings[durability])

    def ratio(self, durability: str) -> float:
        return self.rate(durability) / median(self.received)

    def slot_ratio(self, durability: str) -> float:
        """Of what the bare loop got in the same round, the median of all rounds."""
        each = zip(self.readings[durability], self.drained, strict=True)
        return median(reading.rows_per_s / drained for reading, drained in each)


def run(sizes: Sizes) -> dict[str, object]:
    """Write both loads, then read each in ``sizes.rounds`` rounds, in turns; medians.

    Each load has yardsticks of its own in each round, so that neither the machine's moods nor what
    Postgres takes to decode ten tables are taken for the reader's.
    """
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-read-") as directory,
        open_source(Path(directory) / "postgres") as source,
    ):
        create_ten_tables(source)
        one = _written(source, sizes, "one", ("disk", "fsync"), source.load)
        ten = _written(source, sizes, "ten", ("disk",), partial(load_ten_tables, source))
        source.checkpoint()
        for number in range(sizes.rounds):
            for rounds in (one, ten):
                _measure(Path(directory) / rounds.name, source, rounds, number)
        for rounds in (one, ten):
            source.drop_slot(rounds.slot)
    return _figures(sizes, one, ten)


def _written(
    source: BenchmarkSource,
    sizes: Sizes,
    name: str,
    durabilities: Sequence[str],
    write: Callable[[int, int], WrittenRows],
) -> ReadRounds:
    """Write a load behind a slot that stays where it is."""
    progress(f"read, {name}: writing {sizes.rows:,} rows")
    source.create_slot(f"original_{name}")
    load = write(sizes.rows, sizes.transaction_rows)
    return ReadRounds(name, load, {durability: [] for durability in durabilities})


def _measure(directory: Path, source: BenchmarkSource, rounds: ReadRounds, number: int) -> None:
    """Read a load once by each yardstick, and by the reader with each durability."""
    what = rounds.name
    with source.slot_copy(rounds.slot, f"reference_{what}_{number}") as slot:
        rounds.received.append(receive(source.postgres, slot, rounds.load))
    with source.slot_copy(rounds.slot, f"bare_loop_{what}_{number}") as slot:
        rounds.drained.append(drain(source.postgres, slot, rounds.load))
    progress(
        f"read, {what}: pg_recvlogical {rounds.received[-1]:,.0f} rows/s, "
        f"a bare psycopg loop {rounds.drained[-1]:,.0f}"
    )
    for durability, done in rounds.readings.items():
        name = f"{what}_{durability}_{number}"
        with source.slot_copy(rounds.slot, name):
            done.append(_read(directory / name, source, rounds.load, name, durability))
        progress(f"read, {what}: reader ({durability}) {done[-1].rows_per_s:,.0f} rows/s")


def _figures(sizes: Sizes, one: ReadRounds, ten: ReadRounds) -> dict[str, object]:
    disk, fsync = one.readings["disk"], one.readings["fsync"]
    return {
        "rows": sizes.rows,
        "transaction_rows": sizes.transaction_rows,
        "row_bytes": round(disk[0].row_bytes),
        "reader_rows_per_s_fsync": round(one.rate("fsync")),
        "read_ratio_fsync": round(one.ratio("fsync"), 3),
        "peak_rss_mb": max(reading.peak_rss_mb for reading in [*disk, *fsync]),
        **_of_load(one, ""),
        **_of_load(ten, "_ten_tables"),
        "ten_tables_change": round(ten.slot_ratio("disk") / one.slot_ratio("disk") - 1, 3),
        "rounds": _each_round(one, "") | _each_round(ten, "_ten_tables"),
    }


def _of_load(rounds: ReadRounds, ending: str) -> dict[str, object]:
    disk = rounds.readings["disk"]
    return {
        f"recvlogical_rows_per_s{ending}": round(median(rounds.received)),
        f"slot_rows_per_s{ending}": round(median(rounds.drained)),
        f"reader_rows_per_s{ending}": round(rounds.rate("disk")),
        f"read_ratio{ending}": round(rounds.ratio("disk"), 3),
        f"slot_ratio{ending}": round(rounds.slot_ratio("disk"), 3),
        f"cpu_us_per_message{ending}": round(median(each.cpu_us_per_message for each in disk), 2),
    }


def _each_round(rounds: ReadRounds, ending: str) -> dict[str, list[int]]:
    readers = {
        f"reader_rows_per_s{'' if durability == 'disk' else '_' + durability}{ending}": [
            round(reading.rows_per_s) for reading in readings
        ]
        for durability, readings in rounds.readings.items()
    }
    return readers | {
        f"recvlogical_rows_per_s{ending}": [round(rate) for rate in rounds.received],
        f"slot_rows_per_s{ending}": [round(rate) for rate in rounds.drained],
    }


def _read(
    directory: Path, source: BenchmarkSource, load: WrittenRows, slot: str, durability: str
) -> LogReading:
    with measured_reader(
        directory, source, slot, publication=load.publication, durability=durability
    ) as reader:
        ended_at = reader.wait_for_rows(load.rows)
        frame = next(reader.view.frames(0, 1))
        row_bytes = pc.mean(pc.binary_length(frame.raw.column("payload"))).as_py()
    figures = reader.meter.figures()["reader"]
    return LogReading(
        rows_per_s=load.rows / (ended_at - reader.program.begun_at),
        cpu_us_per_message=figures["cpu_s"] * 1e6 / load.rows,
        peak_rss_mb=figures["peak_rss_mb"],
        row_bytes=row_bytes,
    )
