"""In which form values are written as JSON, and what else the consumers of a source ask of decode.

Consumers of one source may want their values in different forms. A batch is decoded once, and
``record``, ``changes`` and ``before`` are written once for each form that somebody wants; ``view``
then shows a consumer its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, Literal, get_args

import orjson
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA
from cdc.errors import ConfigError

Timestamps = Literal["iso8601", "unix_microsecond", "postgres"]
Numbers = Literal["number", "string"]

_IN_FORMS = ("record", "changes", "before")

EVENT_TEXT: Final = "event_text"

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

    def __post_init__(self) -> None:
        for given, known in ((self.timestamps, Timestamps), (self.numbers, Numbers)):
            if given not in get_args(known):
                raise ConfigError(
                    f"there is no format {given!r} of values",
                    fix=f"use one of {', '.join(get_args(known))}",
                )


DEFAULT_FORMAT = ValueFormat()


@dataclass(frozen=True)
class Wanted:
    """What decode is to write: the forms, the first under the plain names, and ``before`` or not.

    ``before`` is the old row of an update as far as the source sent it, else null.

    ``times`` names the column that holds a row's event time, by ``schema.table``, under an empty
    name for all other tables. Its text, as the source wrote it, is then in ``EVENT_TEXT``: null for
    what is no row, empty where the table has no such column.

    With ``texts`` each row also has the columns ``TEXTS``: its values as the source wrote them, and
    the version of its table.
    """

    formats: tuple[ValueFormat, ...] = (DEFAULT_FORMAT,)
    before: bool = False
    times: tuple[tuple[str, str], ...] = ()
    texts: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are written in every form."""
        return _IN_FORMS if self.before else _IN_FORMS[:-1]

    def name(self, column: str, at: int) -> str:
        """What ``column`` is called in the form at this place."""
        return f"{column}~{at}" if at else column

    @property
    def schema(self) -> pa.Schema:
        """CHANGE_SCHEMA with what is wanted beyond it behind its columns."""
        extra = [pa.field(name, pa.string()) for name in self._beside]
        for at in range(1, len(self.formats)):
            extra += [pa.field(self.name(name, at), pa.string()) for name in self.columns]
        return pa.schema([*CHANGE_SCHEMA, *extra])

    @property
    def _beside(self) -> tuple[str, ...]:
        """What rows have beside CHANGE_SCHEMA, under the plain names."""
        return (
            *(("before",) if self.before else ()),
            *((EVENT_TEXT,) if self.times else ()),
            *(TEXTS if self.texts else ()),
        )

    def time_column(self, schema: str, table: str) -> str | None:
        """The column with the event time of a table's rows, if it is wanted."""
        named = dict(self.times)
        return named.get(f"{schema}.{table}", named.get(""))

    def view(self, changes: pa.RecordBatch, form: ValueFormat) -> pa.RecordBatch:
        """``changes`` as decoded for this, with the values in ``form``: CHANGE_SCHEMA, and
        ``before``, event times and texts if they are wanted."""
        at = self.formats.index(form)
        names = [*CHANGE_SCHEMA.names, *self._beside]
        chosen = [self.name(name, at) if name in self.columns else name for name in names]
        return pa.RecordBatch.from_arrays(
            [changes.column(name) for name in chosen],
            schema=pa.schema([changes.schema.field(name) for name in names]),
        )

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
            tuple((table, column) for table, column in read["times"]),
            read["texts"],
        )


PLAIN = Wanted()
"""The default form alone: CHANGE_SCHEMA."""
