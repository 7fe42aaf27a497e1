"""A release as messages: what goes out in one step, in order, each under its number. Pure.

First what came late, if that is delivered, then what its time has come for, then, where it is asked
for, the watermark. Invariant: the same step gives the same messages under the same
numbers, whenever it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from cdc.change import PLACED_SCHEMA, synthetic_rows
from cdc.cursor import Cursor
from cdc.decoding.format import ValueFormat
from cdc.decoding.shapes.metadata import iso8601
from cdc.eventtime.released import Released
from cdc.eventtime.times import NO_TIME
from cdc.state.blocked_groups import WHOLE_TABLE
from cdc.state.event_numbers import OUR_LSN, Numbering
from spark_pipeline.delivery.merged_shape import SOURCE
from spark_pipeline.delivery.outcome import Outcome, Poison, together
from spark_pipeline.delivery.sender import given_up

WATERMARK: Final = "watermark"
WINDOW: Final = "window"
_CURSOR: Final = ("commit_lsn", "commit_idx")


@dataclass(frozen=True)
class OwnRows:
    """Messages that are no changes of rows: CHANGE_SCHEMA."""

    rows: pa.RecordBatch
    source: int = 0
    placed: bool = False  # whether they stand somewhere in their database's history


@dataclass(frozen=True, eq=False)
class Release:
    """The messages of a step. They are made piece by piece: a release may be very large."""

    late: Released | None
    released: Released | None
    own: Sequence[OwnRows]
    numbering: Numbering  # of the first of them
    form: ValueFormat

    def __len__(self) -> int:
        return sum(count for count, _, _ in self._parts())

    @property
    def after(self) -> Numbering:
        """That of what follows."""
        return self.numbering.after(len(self))

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        """The number of the database of each message."""
        parts = [of_part for _, of_part, _ in self._parts()]
        return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)

    def piece(self, start: int, stop: int) -> pa.RecordBatch:
        """The messages ``[start, stop)``, of which there is at least one: CHANGE_SCHEMA and what
        was added, PLACED_SCHEMA and SOURCE."""
        found, first = [], 0
        for count, _, made in self._parts():
            low, high = max(start - first, 0), min(stop - first, count)
            if low < high:
                found.append(made(low, high, self.numbering.after(first + low)))
            first += count
        return found[0] if len(found) == 1 else pa.concat_batches(found)

    def _parts(self) -> Iterator[tuple[int, npt.NDArray[np.integer], _Made]]:
        """In order: how many there are, of which database each is, and what makes them."""
        for some, is_late in ((self.late, True), (self.released, False)):
            if some is not None:
                yield len(some), some.sources, partial(self._changes, some, is_late)
        for own in self.own:
            if count := own.rows.num_rows:
                yield count, np.full(count, own.source), partial(self._our_own, own)

    def _changes(
        self, some: Released, is_late: bool, start: int, stop: int, numbering: Numbering
    ) -> pa.RecordBatch:
        rows, count = some.piece(start, stop), stop - start
        return _placed(
            rows,
            numbering,
            origin=[rows.column(name) for name in _CURSOR],
            time=_json_times(some.times[start:stop], self.form),
            late=pa.repeat("true", count) if is_late else pa.nulls(count, pa.string()),
            source=some.sources[start:stop],
        )

    def _our_own(self, own: OwnRows, start: int, stop: int, numbering: Numbering) -> pa.RecordBatch:
        rows, nothing = own.rows.slice(start, stop - start), pa.nulls(stop - start, pa.string())
        origin = [rows.column(name) for name in _CURSOR] if own.placed else None
        of_changes = self.late or self.released
        for name in of_changes.batches[0].schema.names if of_changes is not None else ():
            if name not in rows.schema.names:
                rows = rows.append_column(name, nothing)
        source = np.full(stop - start, own.source)
        return _placed(rows, numbering, origin=origin, time=nothing, late=nothing, source=source)


_Made = Callable[[int, int, Numbering], pa.RecordBatch]


def _placed(
    rows: pa.RecordBatch,
    numbering: Numbering,
    *,
    origin: Sequence[pa.Array] | None,
    time: pa.Array,
    late: pa.Array,
    source: npt.NDArray[np.integer],
) -> pa.RecordBatch:
    """Rows under their numbers; what is our own has no other place."""
    places = [pa.array(each) for each in numbering.places(rows.num_rows)]
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    columns |= zip(_CURSOR, places, strict=True)
    columns |= zip(PLACED_SCHEMA.names, [*(origin or places), time, late], strict=True)
    columns[SOURCE] = pa.array(source.astype(np.int32))
    return pa.RecordBatch.from_pydict(columns)


def _json_times(times: npt.NDArray[np.int64], form: ValueFormat) -> pa.StringArray:
    none = times == NO_TIME
    us = pa.array(np.where(none, 0, times), pa.int64(), mask=none)
    if form.timestamps == "unix_microsecond":
        return us.cast(pa.string())
    return iso8601(us.view(pa.timestamp("us")))


def iso(us: int) -> str:
    """A time as the product writes it."""
    return f"{np.datetime64(us, 'us')}Z"


def watermark_row(watermark: int, now: datetime) -> pa.RecordBatch:
    """The message that says how far event time has come."""
    return synthetic_rows(WATERMARK, [orjson.dumps({"watermark": iso(watermark)}).decode()], now)


def late_letters(late: Released, source: int, watermark: int) -> pa.RecordBatch | None:
    """The late rows of one database as dead letters, EVENT_SCHEMA."""
    mine = late.sources == source
    if not mine.any():
        return None
    rows = _alone(late.rows.filter(pa.array(mine)))
    why = (
        f"it came late: its event time is at or below the watermark, which was {iso(watermark)}. "
        "To fix it: raise late_tolerance of the sink, or take it from here"
    )
    return given_up(rows, why, kind="late")


@dataclass(frozen=True)
class SourceResult:
    """What became of the messages of one database."""

    delivered: int
    queued: pa.RecordBatch | None
    dead: list[Poison]


def by_source(release: Release, outcome: Outcome, begun: int, sources: int) -> list[SourceResult]:
    """An outcome whose cursors are numbers, as that of each database, by its own cursors.

    ``begun`` is the position of the first message that it was asked to deliver.
    """
    reached = position(release.numbering, outcome.cursor, len(release))
    codes = release.sources
    settled = np.zeros(len(codes), np.bool_)
    settled[begun:reached] = True
    queued_at = _positions(release.numbering, outcome.queued)
    dead_at = [position(release.numbering, each.cursor, len(release)) for each in outcome.dead]
    settled[queued_at] = settled[dead_at] = False
    found = []
    for source in range(sources):
        queued: list[pa.RecordBatch | None] = []
        mine = codes[queued_at] == source
        if outcome.queued is not None and mine.any():
            queued = [_at_home(release, outcome.queued.filter(pa.array(mine)), queued_at[mine])]
        dead = []
        for at, each in zip(dead_at, outcome.dead, strict=True):
            if codes[at] != source:
                continue
            message = release.piece(at, at + 1)
            origin = _origin(message)
            if origin.lsn % 8 == OUR_LSN:  # it is in no log: it is kept as the message it was
                queued.append(given_up(_alone(message), each.error))
            else:
                error = each.error.replace(str(each.cursor), str(origin))
                dead.append(Poison(origin, error))
        count = int((settled & (codes == source)).sum())
        found.append(SourceResult(count, together(queued), dead))
    return found


def _alone(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Messages that belong to no group."""
    return rows.drop_columns(["error"]).append_column(
        WHOLE_TABLE, pa.array(np.zeros(rows.num_rows, np.bool_))
    )


def position(numbering: Numbering, place: Cursor, most: int) -> int:
    """Which message has this number, from the release's first on; at most ``most``."""
    lsn, idx = np.array([place.lsn], np.int64), np.array([place.idx], np.int64)
    return max(0, min(int(numbering.positions(lsn, idx)[0]), most))


def _positions(numbering: Numbering, rows: pa.RecordBatch | None) -> npt.NDArray[np.int64]:
    if rows is None:
        return np.empty(0, np.int64)
    lsn, idx = (rows.column(name).to_numpy() for name in _CURSOR)
    return numbering.positions(lsn, idx)


def _at_home(release: Release, queued: pa.RecordBatch, at: npt.NDArray[np.int64]) -> pa.RecordBatch:
    """The queued messages under the cursors that they have in their source."""
    first = int(at.min())
    taken = release.piece(first, int(at.max()) + 1).take(pa.array(at - first))
    for name, known in zip(_CURSOR, ("origin_lsn", "origin_idx"), strict=True):
        place = queued.schema.get_field_index(name)
        queued = queued.set_column(place, queued.schema.field(place), taken.column(known))
    return queued


def _origin(message: pa.RecordBatch) -> Cursor:
    lsn, idx = (message.column(name)[0].as_py() for name in ("origin_lsn", "origin_idx"))
    return Cursor(lsn, idx)
