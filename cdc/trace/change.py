"""The change that is traced: found in the log by its cursor or by its row's key.

Invariant: a change that is not found is never taken for one that there never was. Why it is not
there is a value of its own: the log has let it go, has not come to it, or is damaged there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.table import HOW_TO_WRITE, TableName
from cdc.cursor import Cursor, is_free, parse_lsn
from cdc.decoding import decode_changes
from cdc.decoding.annotations import annotations_of
from cdc.decoding.relation import parse_relation
from cdc.errors import CorruptionError, OperatorError, PoisonError, ProtocolError
from cdc.log.frame import Frame
from cdc.log.view import LogReader

KEYS_FOUND_MAX: Final = 100
"""How many changes of one row are looked for at most."""
_BATCHES_PER_LOOK: Final = 256


class Missing(StrEnum):
    """Why the log does not have a change."""

    NO_LOG = "there is no log of this source here"
    LET_GO = "the log has let it go"
    NOT_YET = "the log has not come to it"
    NEVER = "no change has this cursor"
    READ = "it is no change of the log: rows of a backfill stand at such cursors"
    DAMAGED = "its batch in the log cannot be read"


@dataclass(frozen=True)
class TracedChange:
    """A change as the log has it; times in Unix microseconds. ``payload`` has its values."""

    cursor: Cursor
    batch: int
    committed_us: int
    logged_us: int  # 0: its frame does not say
    xid: int
    table_schema: str
    table_name: str
    action: str
    error: str | None
    payload: dict[str, object]

    @property
    def table(self) -> str | None:
        return f"{self.table_schema}.{self.table_name}" if self.table_name else None


@dataclass(frozen=True)
class NotFound:
    """Why a change is not shown, with what the log says of its bounds."""

    cursor: Cursor
    why: Missing
    more: str = ""

    def __str__(self) -> str:
        return f"{self.why.value}{f': {self.more}' if self.more else ''}"


@dataclass(frozen=True)
class RowKey:
    """A row of a table by the values of its primary key, as text and in key order."""

    table: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> RowKey:
        """Read ``public.orders/42``; values are separated by /, which is %2F within one."""
        table, *values = text.split("/")
        if not values or "" in values or not table.strip("."):
            raise OperatorError(
                f"'{text}' is not a table and a key",
                fix="write it as schema.table/key, such as public.orders/42; the columns of a key "
                "are separated by /, and a / in a value is %2F",
                kind="malformed",
            )
        try:
            name = str(TableName.parse(table))
        except ValueError:
            raise OperatorError(
                f"'{table}' is no table", fix=f"write it as {HOW_TO_WRITE}", kind="malformed"
            ) from None
        return cls(name, tuple(map(unquote, values)))

    @property
    def pks(self) -> str:
        return orjson.dumps(list(self.values)).decode()


def read_any_cursor(text: str) -> Cursor:
    """A cursor as LSN:index, or an idempotency key, whose LSN is a number."""
    lsn, colon, idx = text.strip().rpartition(":")
    if colon and idx.isascii() and idx.isdigit():
        if lsn.isascii() and lsn.isdigit():
            return Cursor(int(lsn), int(idx))
        if "/" in lsn:
            return Cursor(parse_lsn(lsn), int(idx))
    raise OperatorError(
        f"'{text}' is neither a cursor nor an idempotency key",
        fix="write it as LSN:index, such as 16/B374D848:3 or 97500059720:3",
        kind="malformed",
    )


def find_change(log: LogReader, cursor: Cursor) -> TracedChange | NotFound:
    """The change at a cursor, or why it is not there."""
    earliest, _evicted = log.floors()
    if cursor < earliest:
        return NotFound(cursor, Missing.LET_GO, f"it begins at {earliest}")
    end = log.next_batch()
    batch = log.seek(cursor)
    if batch < log.first_batch():
        return NotFound(cursor, Missing.LET_GO, f"it begins at {earliest}")
    if is_free(cursor.lsn):
        return NotFound(cursor, Missing.READ)
    if batch >= end:
        return NotFound(cursor, Missing.NOT_YET)
    try:
        (frame,) = log.frames(batch, batch + 1)
        lsn, idx = frame.raw.column("commit_lsn"), frame.raw.column("commit_idx")
        found = _decoded(frame, pc.and_(pc.equal(lsn, cursor.lsn), pc.equal(idx, cursor.idx)))
    except (CorruptionError, ProtocolError, PoisonError) as error:
        return NotFound(cursor, Missing.DAMAGED, str(error))
    return found[0] if found else NotFound(cursor, Missing.NEVER)


def find_by_key(
    log: LogReader, key: RowKey, limit: int, start: Cursor | None = None
) -> Iterator[TracedChange]:
    """The latest changes of a row first, at most ``limit``, none below ``start``."""
    limit = min(limit, KEYS_FOUND_MAX)
    first = log.first_batch()
    if start is not None:
        first = max(first, log.seek(start))
    end = log.next_batch()
    while end > first and limit > 0:
        begin = max(first, end - _BATCHES_PER_LOOK)
        for frame in reversed(list(log.frames(begin, end))):
            for change in reversed(_of_row(frame, key)):
                if limit > 0 and (start is None or change.cursor >= start):
                    yield change
                    limit -= 1
        end = begin


def _of_row(frame: Frame, key: RowKey) -> Sequence[TracedChange]:
    """The changes of a row in a frame. What cannot have its key is left out undecoded."""
    wanted = [
        schema_id
        for schema_id, message in frame.schemas.items()
        if str(parse_relation(message)) == key.table
    ]
    if not wanted:
        return ()
    raw = frame.raw
    chosen = pc.is_in(raw.column("schema_id"), pa.array(wanted, raw.schema.field("schema_id").type))
    for value in key.values:
        chosen = pc.and_(chosen, pc.match_substring(raw.column("payload"), value.encode()))
    if not chosen.true_count:
        return ()
    pks = key.pks
    return [
        change
        for change in _decoded(frame, chosen)
        if pks in (change.payload["record_pks"], change.payload["old_record_pks"])
    ]


def _decoded(frame: Frame, chosen: pa.BooleanArray) -> list[TracedChange]:
    if not chosen.true_count:
        return []
    annotations = annotations_of(frame.annotations, frame.raw.num_rows)
    changes = decode_changes(
        frame.raw.filter(chosen),
        frame.schemas,
        annotations=None if annotations is None else annotations.filter(chosen),
    )
    committed = changes.column("commit_timestamp").cast(pa.int64()).to_pylist()
    values = ("record", "changes", "record_pks", "old_record_pks", "unchanged", "annotations")
    rows = changes.drop_columns(["commit_timestamp"]).to_pylist()
    return [
        TracedChange(
            Cursor(row["commit_lsn"], row["commit_idx"]),
            frame.marker.batch_idx,
            committed_us,
            frame.marker.logged_us,
            row["xid"],
            row["table_schema"],
            row["table_name"],
            row["action"],
            row["error"],
            {name: row[name] for name in values},
        )
        for row, committed_us in zip(rows, committed, strict=True)
    ]
