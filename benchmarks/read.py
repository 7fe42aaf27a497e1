"""How close the reader comes to what the slot can give.

The same rows are read again and again, each time through a fresh copy of one slot that nobody
moves: by ``pg_recvlogical``, and by the reader's own process into the log, with both durabilities.
All are measured from the start of streaming: one to its end position, the other to the last row
that can be read from the log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pyarrow.compute as pc

from benchmarks.reader import measured_reader
from benchmarks.recvlogical import receive
from benchmarks.sizes import Sizes, progress
from benchmarks.source import Load, Source, open_source
from benchmarks.ten_tables import create_ten_tables, load_ten_tables


@dataclass(frozen=True)
class Reading:
    """One run of the reader over the whole load."""

    rows_per_s: float
    cpu_us_per_message: float
    peak_rss_mb: float
    row_bytes: float


def run(sizes: Sizes) -> dict[str, object]:
    """Write once, read ``sizes.rounds`` times each way; medians. Then the same of ten tables."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-read-") as directory,
        open_source(Path(directory) / "postgres") as source,
    ):
        create_ten_tables(source)
        one = _measure(
            Path(directory) / "one", source, sizes, ("disk", "fsync"),
            lambda: source.load(sizes.rows, sizes.transaction_rows),
        )  # fmt: skip
        ten = _measure(
            Path(directory) / "ten", source, sizes, ("disk",),
            lambda: load_ten_tables(source, sizes.rows, sizes.transaction_rows),
        )  # fmt: skip
    return _figures(sizes, one, ten)


@dataclass(frozen=True)
class Rounds:
    """Every measurement of one load."""

    received: list[float]
    readings: dict[str, list[Reading]]  # by durability

    def rate(self, durability: str) -> float:
        return median(reading.rows_per_s for reading in self.readings[durability])

    def ratio(self, durability: str) -> float:
        return self.rate(durability) / median(self.received)


def _measure(
    directory: Path,
    source: Source,
    sizes: Sizes,
    durabilities: Sequence[str],
    write: Callable[[], Load],
) -> Rounds:
    """Write a load, then read it in rounds by ``pg_recvlogical`` and by the reader."""
    what = directory.name
    original = f"original_{what}"
    source.create_slot(original)
    progress(f"read, {what}: writing {sizes.rows:,} rows")
    load = write()
    source.checkpoint()
    rounds = Rounds([], {durability: [] for durability in durabilities})
    for number in range(sizes.rounds):
        with source.slot_copy(original, f"reference_{what}_{number}") as slot:
            rounds.received.append(receive(source.postgres, slot, load))
        progress(f"read, {what}: pg_recvlogical {rounds.received[-1]:,.0f} rows/s")
        for durability, done in rounds.readings.items():
            name = f"{what}_{durability}_{number}"
            with source.slot_copy(original, name):
                done.append(_read(directory / name, source, load, name, durability))
            progress(f"read, {what}: reader ({durability}) {done[-1].rows_per_s:,.0f} rows/s")
    source.drop_slot(original)
    return rounds


def _figures(sizes: Sizes, one: Rounds, ten: Rounds) -> dict[str, object]:
    disk, fsync = one.readings["disk"], one.readings["fsync"]
    return {
        "rows": sizes.rows,
        "transaction_rows": sizes.transaction_rows,
        "row_bytes": round(disk[0].row_bytes),
        "recvlogical_rows_per_s": round(median(one.received)),
        "reader_rows_per_s": round(one.rate("disk")),
        "reader_rows_per_s_fsync": round(one.rate("fsync")),
        "read_ratio": round(one.ratio("disk"), 3),
        "read_ratio_fsync": round(one.ratio("fsync"), 3),
        "read_ratio_ten_tables": round(ten.ratio("disk"), 3),
        "ten_tables_change": round(ten.ratio("disk") / one.ratio("disk") - 1, 3),
        "cpu_us_per_message": round(median(r.cpu_us_per_message for r in disk), 2),
        "cpu_us_per_message_ten_tables": round(
            median(r.cpu_us_per_message for r in ten.readings["disk"]), 2
        ),
        "peak_rss_mb": max(reading.peak_rss_mb for reading in [*disk, *fsync]),
        "rounds": {
            "recvlogical_rows_per_s": [round(rate) for rate in one.received],
            "reader_rows_per_s": [round(reading.rows_per_s) for reading in disk],
            "reader_rows_per_s_fsync": [round(reading.rows_per_s) for reading in fsync],
            "recvlogical_rows_per_s_ten_tables": [round(rate) for rate in ten.received],
            "reader_rows_per_s_ten_tables": [
                round(reading.rows_per_s) for reading in ten.readings["disk"]
            ],
        },
    }


def _read(directory: Path, source: Source, load: Load, slot: str, durability: str) -> Reading:
    with measured_reader(
        directory, source, slot, publication=load.publication, durability=durability
    ) as reader:
        ended_at = reader.wait_for_rows(load.rows)
        frame = next(reader.view.frames(0, 1))
        row_bytes = pc.mean(pc.binary_length(frame.raw.column("payload"))).as_py()
    figures = reader.meter.figures()["reader"]
    return Reading(
        rows_per_s=load.rows / (ended_at - reader.program.begun_at),
        cpu_us_per_message=figures["cpu_s"] * 1e6 / load.rows,
        peak_rss_mb=figures["peak_rss_mb"],
        row_bytes=row_bytes,
    )
