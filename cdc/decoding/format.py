"""In which form values are written as JSON, and what else the consumers of a source ask of decode.

Consumers of one source may want their values in different forms. A batch is decoded once, and
``record``, ``changes`` and ``before`` are written once for each form that a consumer wants;
``view`` then shows a consumer its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Final, Literal, get_args

import orjson
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA
from cdc.errors import ConfigError

Timestamps = Literal["iso8601", "unix_microsecond", "postgres"]
Numbers = Literal["number", "string"]
Documents = Literal["embedded", "text"]

_IN_FORMS = ("record", "changes")

EVENT_TEXT: Final = "event_text"

KEY, OLD_KEY, ROW_SCHEMA = "key", "old_key", "row_schema"
ROW_TEXT: Final = "row_text"
OLD_ROW_TEXT: Final = "old_row_text"
TABLE_VERSION: Final = "table_version"
TEXTS: Final = (ROW_TEXT, OLD_ROW_TEXT, TABLE_VERSION)
"""For sinks that write typed columns: see ``row_texts``."""


@dataclass(frozen=True)
class ValueFormat:
    """How a consumer wants values that have more than one good form in JSON."""

    timestamps: Timestamps = "iso8601"
    numbers: Numbers = "number"  # of int8 and numeric, which many JSON readers round
    documents: Documents = "embedded"  # of json and jsonb; readers with a schema want text

    def __post_init__(self) -> None:
        for given, known in (
            (self.timestamps, Timestamps),
            (self.numbers, Numbers),
            (self.documents, Documents),
        ):
            if given not in get_args(known):
                raise ConfigError(
                    f"there is no format {given!r} of values",
                    fix=f"use one of {', '.join(get_args(known))}",
                )


DEFAULT_FORMAT = ValueFormat()


@dataclass(frozen=True)
class Wanted:
    """What decode is to write: the forms, the first under the plain names, and what is beside.

    ``before`` is the old row of an update as far as the source sent it, else null.

    ``keyed``: ``KEY`` is the primary key as a JSON object and ``OLD_KEY`` the one that an update
    left; null for what is no row and for tables without a key. ``described``: ``ROW_SCHEMA`` is
    the schema of the row's columns in the words of Kafka Connect, null for what is no row.

    ``times`` names the columns of tables that hold event times. The text of each, as the source
    wrote it, is in a column of its own (``time_name``): null for what is no row, empty where the
    table has no such column.

    Without ``formats`` no JSON of rows is written, for sinks that make nothing of it.

    With ``texts`` each row also has the columns ``TEXTS``: its values as the source wrote them, and
    the version of its table.
    """

    formats: tuple[ValueFormat, ...] = (DEFAULT_FORMAT,)
    before: bool = False
    times: tuple[str, ...] = ()
    keyed: bool = False
    described: bool = False
    texts: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are written in every form."""
        return (*_IN_FORMS, *self._extra_in_forms)

    @property
    def _extra_in_forms(self) -> tuple[str, ...]:
        return (
            *(("before",) if self.before else ()),
            *((KEY, OLD_KEY) if self.keyed else ()),
            *((ROW_SCHEMA,) if self.described else ()),
        )

    def name(self, column: str, at: int) -> str:
        """What ``column`` is called in the form at this place."""
        return f"{column}~{at}" if at else column

    @cached_property
    def schema(self) -> pa.Schema:
        """CHANGE_SCHEMA with what is wanted beyond it behind its columns."""
        extra = [pa.field(name, pa.string()) for name in self._extra_in_forms]
        extra += [pa.field(self.time_name(column), pa.string()) for column in self.times]
        extra += [pa.field(name, pa.string()) for name in (TEXTS if self.texts else ())]
        for at in range(1, len(self.formats)):
            extra += [pa.field(self.name(name, at), pa.string()) for name in self.columns]
        return pa.schema([*CHANGE_SCHEMA, *extra])

    def time_name(self, column: str) -> str:
        """What the text of a column with event times is called."""
        return f"{EVENT_TEXT}~{self.times.index(column)}"

    def view(
        self, changes: pa.RecordBatch, form: ValueFormat, times: Sequence[str] = ()
    ) -> pa.RecordBatch:
        """``changes`` as decoded for this, with the values in ``form``: CHANGE_SCHEMA, what else is
        wanted in each form, and the texts of the columns ``times``."""
        at = self.formats.index(form) if self.formats else 0
        if len(self.formats) <= 1 and self.times == tuple(times) and changes.schema == self.schema:
            return changes
        names = [*CHANGE_SCHEMA.names, *self._extra_in_forms]
        names += [self.time_name(column) for column in times]
        names += TEXTS if self.texts else ()
        chosen = [self.name(name, at) if name in self.columns else name for name in names]
        return pa.RecordBatch.from_arrays(
            [changes.column(name) for name in chosen],
            schema=pa.schema([changes.schema.field(name) for name in names]),
        )

    def widened(self, other: Wanted) -> Wanted:
        """The same with what ``other`` has beyond it.

        Invariant: forms and times keep their places, so a view for ``self`` stays right on what was
        decoded for the wider one.
        """
        return Wanted(
            tuple(dict.fromkeys((*self.formats, *other.formats))),
            self.before or other.before,
            tuple(dict.fromkeys((*self.times, *other.times))),
            self.keyed or other.keyed,
            self.described or other.described,
            self.texts or other.texts,
        )

    def without_texts(self) -> Wanted:
        """The same without the texts of rows."""
        return replace(self, texts=False)

    def to_text(self) -> str:
        """For where only text can pass, such as the options of a Spark source."""
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> Wanted:
        """What ``to_text`` wrote."""
        read = orjson.loads(text)
        return cls(
            tuple(ValueFormat(**form) for form in read["formats"]),
            read["before"],
            tuple(read["times"]),
            read["keyed"],
            read["described"],
            read["texts"],
        )


PLAIN = Wanted()
"""The default form alone: CHANGE_SCHEMA."""
