"""What inserts, updates and deletes say: the record, the changes, the key, what was not sent.

The rows handed in are of one table version, one kind and one form (with or without an old tuple).
Invariants: an unchanged TOAST value is filled from the old row where the source sent
one, and is otherwise left out and listed; it is never null and never made up. A value that its type
cannot have is the fault of its row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.decoding.columns import (
    BadValuesError,
    Mask,
    PlacedError,
    Positions,
    TextColumn,
    first,
    nulls_of,
    without,
)
from cdc.decoding.connect import row_schema
from cdc.decoding.format import (
    KEY,
    OLD_KEY,
    OLD_ROW_TEXT,
    ROW_SCHEMA,
    ROW_TEXT,
    ValueFormat,
    Wanted,
)
from cdc.decoding.joins import repeated
from cdc.decoding.plan import TablePlan
from cdc.decoding.row_texts import lines_of
from cdc.decoding.tuples import Payloads, read_tuples
from cdc.decoding.types import JsonColumn, text_json
from cdc.decoding.types.objects import JsonMember, array_of, names_where, object_of
from cdc.decoding.types.text import TEXT, from_codec

_TAG = 5  # after the kind byte and the oid
_NEW = ord("N")
# What is not UTF-8 is a fault of its row already.
_AS_IT_IS = pc.CastOptions(target_type=pa.string(), allow_invalid_utf8=True)
_Result = TypeVar("_Result")


@dataclass
class Faults:
    """The rows of a group that cannot be decoded: the first bad column of each, and why."""

    by_row: dict[int, tuple[str, str]] = field(default_factory=dict)

    def sound(
        self, name: str, texts: pa.BinaryArray, of: Callable[[pa.BinaryArray], _Result]
    ) -> _Result:
        """What ``of`` makes of a column once the values are out that it refuses.

        A type may look closer once the worst is out, so it may take a few rounds; each leaves
        fewer values.
        """
        while True:
            try:
                return of(texts)
            except BadValuesError as bad:
                for row, what in bad.faults.items():
                    self.by_row.setdefault(row, (name, what))
                rest = without(texts, bad.faults)
                assert rest.null_count > texts.null_count, "a type refused what is not there"
                texts = rest


@dataclass(frozen=True)
class DecodedGroup:
    """What a group's messages say, by column of the result, and its bad rows.

    A column that is not there is null in all of them.
    """

    columns: dict[str, pa.StringArray]
    faults: Faults


@dataclass(frozen=True)
class Tuples:
    """The old and the new tuple of each row, as columns; None where the messages have none."""

    old: list[TextColumn] | None
    new: list[TextColumn] | None
    faults: Faults = field(default_factory=Faults)

    @property
    def row(self) -> list[TextColumn]:
        """The new tuple, or, of a delete, the old one."""
        row = self.new if self.new is not None else self.old
        assert row is not None  # every kind of row has one of them
        return row


def read_rows(
    plan: TablePlan, payloads: Payloads, starts: Positions, ends: Positions, *, kind: str, tag: str
) -> Tuples:
    """Walk messages whose first tuple has this ``tag``: N is a new one, K and O are old ones.

    What an update did not send again is taken from its old row, if that was sent.
    """
    faults = Faults()

    def read(at: Positions) -> tuple[list[TextColumn], Positions]:
        columns, at = read_tuples(payloads, at, ends, plan.names)
        return _in_utf8(plan, columns, faults), at

    columns, at = read(starts + _TAG + 1)
    old = None if tag == "N" else columns
    new = columns if tag == "N" else None
    if old is not None and kind == "U":
        _refuse(at >= ends, "its message ends before the new tuple")
        _refuse(payloads.bytes[at] != _NEW, "no new tuple follows its old one")
        new, at = read(at + 1)
        if tag == "O":
            new = [filled(column, before) for column, before in zip(new, old, strict=True)]
    _refuse(at != ends, "bytes follow its last tuple")
    return Tuples(old, new, faults)


def _in_utf8(plan: TablePlan, columns: list[TextColumn], faults: Faults) -> list[TextColumn]:
    """The same in UTF-8, if they were taken as the database stores them."""
    codec = plan.relation.codec
    if not codec:
        return columns
    return [
        TextColumn(faults.sound(name, one.values, partial(from_codec, codec=codec)), one.unchanged)
        for name, one in zip(plan.names, columns, strict=True)
    ]


def decode_rows(
    plan: TablePlan, tuples: Tuples, count: int, wanted: Wanted, *, kind: str, tag: str
) -> DecodedGroup:
    """The JSON of rows that ``read_rows`` read."""
    old = tuples.old if kind == "U" else None
    rows = _GroupRows(plan, tuples.row, old, count, tag == "O", tuples.faults)
    columns = {"record_pks": rows.keys(), "unchanged": rows.unchanged()}
    for at, form in enumerate(wanted.formats):
        columns[wanted.name("record", at)] = rows.record(form)
        if kind == "U":
            columns[wanted.name("changes", at)] = rows.changes(form)
        if rows.old is not None and wanted.before:
            columns[wanted.name("before", at)] = rows.before(form)
        if wanted.keyed and plan.relation.key:
            columns[wanted.name(KEY, at)] = rows.key(form)
            columns[wanted.name(OLD_KEY, at)] = rows.old_key(form)
        if wanted.described:
            columns[wanted.name(ROW_SCHEMA, at)] = repeated(row_schema(plan, form), count)
    if rows.left.any():
        columns["old_record_pks"] = rows.old_keys()
    for column in wanted.times:
        columns[wanted.time_name(column)] = rows.event_text(column)
    if wanted.texts:
        columns[ROW_TEXT] = rows.line(rows.row)
        if rows.left.any():
            columns[OLD_ROW_TEXT] = rows.old_lines()
    return DecodedGroup(columns, rows.faults)


def decode_columns(
    plan: TablePlan, columns: list[TextColumn], count: int, wanted: Wanted
) -> DecodedGroup:
    """The JSON of rows whose columns were read already, as new rows."""
    faults = Faults()
    tuples = Tuples(None, _in_utf8(plan, columns, faults), faults)
    return decode_rows(plan, tuples, count, wanted, kind="R", tag="N")


def keys_of(plan: TablePlan, tuples: Tuples, count: int, *, kind: str, tag: str) -> RowKeys:
    """The keys alone of rows that ``read_rows`` read; as texts they are those of a change."""
    old = tuples.old if kind == "U" else None
    rows = _GroupRows(plan, tuples.row, old, count, tag == "O", tuples.faults)
    return RowKeys(rows.keys(), rows.old_keys() or pa.nulls(count, pa.string()), rows.unchanged())


@dataclass(frozen=True)
class RowKeys:
    """The columns of the result that say which row a message is of, and what it did not send."""

    record_pks: pa.StringArray
    old_record_pks: pa.StringArray
    unchanged: pa.StringArray


@dataclass
class _GroupRows:
    """The rows of a group while their JSON is written, ``old`` only for updates."""

    plan: TablePlan
    row: list[TextColumn]
    old: list[TextColumn] | None
    count: int
    old_is_whole: bool
    faults: Faults

    def record(self, form: ValueFormat) -> pa.StringArray:
        return self._object(self.row, form)

    def before(self, form: ValueFormat) -> pa.StringArray:
        """The old row of an update: all of it, or its key and nulls."""
        assert self.old is not None
        return self._object(self.old, form)

    def changes(self, form: ValueFormat) -> pa.StringArray:
        """The old values of those columns that differ, of all that the old tuple carries."""
        if self.old is None:
            return object_of([], self.count)
        compared = range(len(self.row)) if self.old_is_whole else self.plan.identity
        members = []
        for at in compared:
            differs = differences(self.old[at], self.row[at])
            if differs.any():
                members.append(self._member(at, self.old[at], form, differs))
        return object_of(members, self.count)

    @cached_property
    def left(self) -> Mask:
        """Which updates took another key than their rows had.

        An old key ('K') carries the columns of the replica identity alone.
        """
        changed = np.zeros(self.count, dtype=bool)
        if self.old is not None:
            for at in self.plan.relation.key:
                if at in self._known:
                    changed |= differences(self.old[at], self.row[at])
        return changed

    @property
    def _known(self) -> Container[int]:
        """The columns that the old tuple carries."""
        return range(len(self.row)) if self.old_is_whole else self.plan.identity

    def _key_columns(self, *, old: bool) -> list[tuple[int, TextColumn]]:
        """The columns of the key, with their positions; of updates the new ones or the old."""
        found = []
        for at in self.plan.relation.key:
            column = self.row[at]
            if self.old is not None:
                is_old = old and at in self._known
                column = self.old[at] if is_old else filled(column, self.old[at])
            found.append((at, column))
        return found

    def _key_texts(self, *, old: bool) -> pa.StringArray:
        columns = [
            self.faults.sound(self.plan.names[at], column.values, text_json)
            for at, column in self._key_columns(old=old)
        ]
        return array_of(columns, self.count)

    def keys(self) -> pa.StringArray:
        """The key's values as JSON strings: of each the text that Postgres wrote."""
        return self._key_texts(old=False)

    def old_keys(self) -> pa.StringArray:
        """The keys that updates took from their rows, null for all others."""
        return self._only_left(self._key_texts(old=True))

    def key(self, form: ValueFormat) -> pa.StringArray:
        """The key as an object of its columns."""
        return self._key_object(form, old=False)

    def old_key(self, form: ValueFormat) -> pa.StringArray:
        """The keys that updates took from their rows, as objects, null for all others."""
        if not self.left.any():
            return pa.nulls(self.count, pa.string())
        return self._only_left(self._key_object(form, old=True))

    def _key_object(self, form: ValueFormat, *, old: bool) -> pa.StringArray:
        columns = self._key_columns(old=old)
        members = [self._member(at, column, form, None) for at, column in columns]
        return object_of(members, self.count)

    def _only_left(self, keys: pa.StringArray) -> pa.StringArray:
        return pc.if_else(pa.array(self.left), keys, pa.scalar(None, pa.string()))

    def line(self, columns: list[TextColumn]) -> pa.StringArray:
        """The values as COPY reads them; null where a value was not sent."""
        named = zip(self.plan.names, columns, strict=True)
        texts = [self.faults.sound(name, column.values, TEXT.typed) for name, column in named]
        return lines_of(texts, self.count)

    def old_lines(self) -> pa.StringArray:
        """The old rows of updates that changed their key, null for all others.

        The key of a table that has none is its whole row.
        """
        assert self.old is not None
        columns = [
            old if at in self._known else filled(new, old)
            for at, (old, new) in enumerate(zip(self.old, self.row, strict=True))
        ]
        return self._only_left(self.line(columns))

    def unchanged(self) -> pa.StringArray:
        return names_where(
            [
                (name, text.unchanged)
                for name, text in zip(self.plan.json_names, self.row, strict=True)
                if text.unchanged is not None
            ],
            self.count,
        )

    def event_text(self, name: str) -> pa.StringArray:
        """What stands in a column with event times."""
        if name not in self.plan.names:
            return pa.repeat("", self.count)
        return pc.cast(self.row[self.plan.names.index(name)].values, options=_AS_IT_IS)

    def _object(self, columns: list[TextColumn], form: ValueFormat) -> pa.StringArray:
        members = []
        for at, column in enumerate(columns):
            present = None if column.unchanged is None else ~column.unchanged
            members.append(self._member(at, column, form, present))
        return object_of(members, self.count)

    def _member(
        self, at: int, column: TextColumn, form: ValueFormat, present: Mask | None
    ) -> JsonMember:
        plan = self.plan

        def json(texts: pa.BinaryArray) -> JsonColumn:
            return plan.types[at].json(texts, form)

        value = self.faults.sound(plan.names[at], column.values, json)
        return JsonMember(f"{plan.json_names[at]}:", value, present)


def filled(column: TextColumn, before: TextColumn) -> TextColumn:
    """Take what the source did not send again from the old row."""
    if column.unchanged is None:
        return column
    values = pc.if_else(pa.array(column.unchanged), before.values, column.values)
    if before.unchanged is None:
        return TextColumn(values)
    return TextColumn(values, column.unchanged & before.unchanged)


def differences(old: TextColumn, new: TextColumn) -> Mask:
    """Where two columns differ; a value that was not sent differs from nothing."""
    differs: Mask = pc.fill_null(pc.not_equal(old.values, new.values), False).to_numpy(
        zero_copy_only=False
    )
    if old.values.null_count or new.values.null_count:
        differs = differs | (nulls_of(old.values) != nulls_of(new.values))
    for side in (old, new):
        if side.unchanged is not None:
            differs = differs & ~side.unchanged
    return differs


def _refuse(bad: Mask, what: str) -> None:
    if bad.any():
        raise PlacedError(first(bad), what)
