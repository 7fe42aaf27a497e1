"""A release as messages: what goes out in one step, in order, each under its number. Pure.

First what came late, if that is delivered, then what its time has come for, then, where it is asked
for, the watermark. Invariant: the same step gives the same messages under the same
numbers, whenever it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import CHANGE_SCHEMA, PLACED_SCHEMA
from cdc.cursor import Cursor
from cdc.decoding.format import ValueFormat
from cdc.decoding.joins import joined
from cdc.eventtime.released import Released
from cdc.eventtime.times import NO_TIME
from cdc.queue.waiting import WHOLE_TABLE
from cdc.state.numbering import OUR_LSN, Numbering
from spark_pipeline.delivery.merged_shape import SOURCE
from spark_pipeline.delivery.outcome import Outcome, Poison, together
from spark_pipeline.delivery.sender import given_up

WATERMARK: Final = "watermark"
WINDOW: Final = "window"
_CURSOR: Final = ("commit_lsn", "commit_idx")


@dataclass(frozen=True)
class Release:
    """The messages of a step: CHANGE_SCHEMA and what was added, PLACED_SCHEMA and SOURCE."""

    rows: pa.RecordBatch | None
    numbering: Numbering  # of the first of them

    def __len__(self) -> int:
        return 0 if self.rows is None else int(self.rows.num_rows)

    @property
    def after(self) -> Numbering:
        """That of what follows."""
        return self.numbering.after(len(self))


@dataclass(frozen=True)
class OwnRows:
    """Messages that are no changes of rows: CHANGE_SCHEMA."""

    rows: pa.RecordBatch
    source: int = 0
    placed: bool = False  # whether they stand somewhere in their database's history


def release_of(
    late: Released | None,
    released: Released | None,
    own: Sequence[OwnRows],
    numbering: Numbering,
    form: ValueFormat,
) -> Release:
    """These as messages, with our own behind them."""
    parts = []
    for some, is_late in ((late, True), (released, False)):
        if some is not None and some.rows.num_rows:
            parts.append(_of_source(some, is_late=is_late, form=form))
    added = [name for name in parts[0].schema.names if name not in _KNOWN] if parts else []
    parts += [_of_our_own(each, added) for each in own if each.rows.num_rows]
    if not parts:
        return Release(None, numbering)
    rows = pa.concat_batches(parts) if len(parts) > 1 else parts[0]
    lsn, idx = numbering.places(rows.num_rows)
    places = dict(zip(_CURSOR, (pa.array(lsn), pa.array(idx)), strict=True))
    origin = dict(zip(("origin_lsn", "origin_idx"), places.values(), strict=True))
    for name, column in {**origin, **places}.items():
        at = rows.schema.get_field_index(name)
        if name in origin:  # what is our own has no other
            column = pc.if_else(rows.column(_OURS), column, rows.column(name))
        rows = rows.set_column(at, rows.schema.field(at), column)
    return Release(rows.drop_columns([_OURS]), numbering)


_OURS: Final = "ours"
_KNOWN: Final = frozenset([*CHANGE_SCHEMA.names, *PLACED_SCHEMA.names, SOURCE, _OURS])


def _of_source(some: Released, *, is_late: bool, form: ValueFormat) -> pa.RecordBatch:
    rows, count = some.rows, some.rows.num_rows
    late = pa.repeat("true", count) if is_late else pa.nulls(count, pa.string())
    return _with(
        rows,
        lsn=rows.column("commit_lsn"),
        idx=rows.column("commit_idx"),
        time=_json_times(some.times, form),
        late=late,
        source=pa.array(some.sources.astype(np.int32)),
        ours=False,
    )


def _of_our_own(own: OwnRows, added: Sequence[str]) -> pa.RecordBatch:
    rows, count = own.rows, own.rows.num_rows
    for name in added:
        rows = rows.append_column(name, pa.nulls(count, pa.string()))
    nothing = pa.nulls(count, pa.string())
    return _with(
        rows,
        lsn=rows.column("commit_lsn"),
        idx=rows.column("commit_idx"),
        time=nothing,
        late=nothing,
        source=pa.array(np.full(count, own.source, np.int32)),
        ours=not own.placed,
    )


def _with(
    rows: pa.RecordBatch,
    *,
    lsn: pa.Array,
    idx: pa.Array,
    time: pa.Array,
    late: pa.Array,
    source: pa.Array,
    ours: bool,
) -> pa.RecordBatch:
    columns = dict(zip(PLACED_SCHEMA.names, (lsn, idx, time, late), strict=True))
    columns |= {SOURCE: source, _OURS: pa.array(np.full(rows.num_rows, ours))}
    for name, column in columns.items():
        rows = rows.append_column(pa.field(name, column.type), column)
    return rows


def _json_times(times: npt.NDArray[np.int64], form: ValueFormat) -> pa.StringArray:
    none = times == NO_TIME
    us = pa.array(np.where(none, 0, times), pa.int64(), mask=none)
    if form.timestamps == "unix_microsecond":
        return us.cast(pa.string())
    written = us.view(pa.timestamp("us")).cast(pa.string())
    return joined('"', pc.replace_substring(written, " ", "T"), 'Z"')


def iso(us: int) -> str:
    """A time as the product writes it."""
    return f"{np.datetime64(us, 'us')}Z"


def watermark_row(watermark: int, now: datetime) -> pa.RecordBatch:
    """The message that says how far event time has come."""
    return our_row(WATERMARK, orjson.dumps({"watermark": iso(watermark)}).decode(), now)


def our_row(action: str, record: str, now: datetime) -> pa.RecordBatch:
    """A message that is no change of the source."""
    return our_rows(action, pa.array([record]), now)


def our_rows(action: str, records: pa.StringArray, now: datetime) -> pa.RecordBatch:
    """The same for several."""
    count = len(records)
    said: dict[str, object] = {
        "commit_lsn": 0, "commit_idx": 0, "commit_timestamp": now, "xid": 0, "table_schema": "",
        "table_name": "", "action": action, "record_pks": "[]",
    }  # fmt: skip
    columns = [
        records
        if field.name == "record"
        else pa.repeat(pa.scalar(said.get(field.name), field.type), count)
        for field in CHANGE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


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
class OfSource:
    """What became of the messages of one database."""

    delivered: int
    aside: pa.RecordBatch | None
    dead: list[Poison]


def by_source(release: Release, outcome: Outcome, begun: int, sources: int) -> list[OfSource]:
    """An outcome whose cursors are numbers, as that of each database, by its own cursors.

    ``begun`` is the position of the first message that it was asked to deliver.
    """
    rows = release.rows
    assert rows is not None
    reached = position(release.numbering, outcome.cursor, len(release))
    codes = rows.column(SOURCE).to_numpy()
    settled = np.zeros(len(codes), np.bool_)
    settled[begun:reached] = True
    aside_at = _positions(release.numbering, outcome.aside)
    dead_at = [position(release.numbering, each.cursor, len(release)) for each in outcome.dead]
    settled[aside_at] = settled[dead_at] = False
    found = []
    for source in range(sources):
        aside: list[pa.RecordBatch | None] = []
        mine = codes[aside_at] == source
        if outcome.aside is not None and mine.any():
            aside = [_at_home(rows, outcome.aside.filter(pa.array(mine)), aside_at[mine])]
        dead = []
        for at, each in zip(dead_at, outcome.dead, strict=True):
            if codes[at] != source:
                continue
            origin = _origin(rows, at)
            if origin.lsn % 8 == OUR_LSN:  # it is in no log: it is kept as the message it was
                aside.append(given_up(_alone(rows.slice(at, 1)), each.error))
            else:
                error = each.error.replace(str(each.cursor), str(origin))
                dead.append(Poison(origin, error))
        count = int((settled & (codes == source)).sum())
        found.append(OfSource(count, together(aside), dead))
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


def _at_home(
    rows: pa.RecordBatch, aside: pa.RecordBatch, at: npt.NDArray[np.int64]
) -> pa.RecordBatch:
    """What was put aside under the cursors that it has in its source."""
    taken = rows.take(pa.array(at))
    for name, known in zip(_CURSOR, ("origin_lsn", "origin_idx"), strict=True):
        place = aside.schema.get_field_index(name)
        aside = aside.set_column(place, aside.schema.field(place), taken.column(known))
    return aside


def _origin(rows: pa.RecordBatch, at: int) -> Cursor:
    return Cursor(rows.column("origin_lsn")[at].as_py(), rows.column("origin_idx")[at].as_py())
