"""How a sink orders changes by a time that their rows carry, and the windows over that time.

Invariants: a table that has an entry of its own under ``tables`` takes from it what it
gives and all else from the section around it. ``commit_timestamp`` in place of a column is the time
of the commit; a table's own column of that name is ``record.commit_timestamp``. Durations are kept
as the file writes them; the properties that end in ``_us`` are the same in whole microseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cdc.config.expression import FUNCTION, NONE, check_expression, is_function_name
from cdc.config.scalars import Duration, Flag, Section, Size, Table, Text, wrong
from cdc.config.units import parse_duration

WINDOWS_OF_A_ROW_MAX: Final = 1_000
BUFFER_BYTES_MIN: Final = 2**20
BUFFER_BYTES_MAX: Final = 2**30  # a release is one Arrow batch, whose columns hold 2 GiB at most
BY_COMMIT: Final = "commit_timestamp"
"""The type of an event time that is the time of the commit."""
COMMIT_COLUMN: Final = "commit_timestamp"
_COMMIT_COLUMNS: Final = (COMMIT_COLUMN, f"metadata.{COMMIT_COLUMN}")
_OWN_COLUMN: Final = f"record.{COMMIT_COLUMN}"
_BY_CLOCK: Final = ("emit_watermarks", "leaf_partitions", "max_buffer_bytes")
_RESERVED: Final = ("window_start", "window_end")
_NAME: Final = re.compile(r"[^\W\d]\w{0,62}")


def _type(value: str) -> str:
    """Only the form: which types there are is known where they are registered."""
    if value.startswith(FUNCTION) and not is_function_name(value):
        raise wrong("names no function; write python:package.module:function")
    return value


TypeName = Annotated[Text, AfterValidator(_type)]


def _above_zero(value: str) -> str:
    if parse_duration(value) == 0:
        raise wrong("should be more than 0, such as 30s")
    return value


PositiveDuration = Annotated[Duration, AfterValidator(_above_zero)]


@dataclass(frozen=True)
class TableTime:
    """Where the rows of one table have their time, and how far out of order they may come."""

    column: str
    type: str  # BY_COMMIT: not in the row
    late_tolerance_us: int

    @property
    def may_be_either(self) -> bool:
        """Whether a column of the table could be meant, too, where it has one of that name."""
        return self.type == BY_COMMIT and self.column == COMMIT_COLUMN


def column_in_row(column: str) -> str:
    """The name of a table's column, as the file names it."""
    return COMMIT_COLUMN if column == _OWN_COLUMN else column


def _type_is_possible(column: str | None, type_is_given: bool, *place: str | int) -> None:
    if column in _COMMIT_COLUMNS and type_is_given:
        raise wrong(
            f"is for columns, and {column} is the time of the commit; leave type out, or, if a "
            f"column of the table is meant, write column: {_OWN_COLUMN}",
            within=(*place, "type"),
        )


class TimedTable(Section):
    """What is different for one table."""

    name: Table = Field(description="The table.")
    column: Text | None = Field(
        default=None, description="Its column with the event time; if not given, the sink's."
    )
    type: TypeName | None = Field(
        default=None, description="How that column is read; if not given, the sink's."
    )
    late_tolerance: Duration | None = Field(
        default=None, description="Its tolerance; if not given, the sink's."
    )


class EventTime(Section):
    """Which time of a row counts, how long to wait for others, and what becomes of late ones."""

    column: Text | None = Field(
        default=None,
        description="The column with the event time, or commit_timestamp for the time of the "
        "commit; required unless every table under tables has one. A table's own column of that "
        "name is record.commit_timestamp; beside such a table, the commit's time is "
        "metadata.commit_timestamp.",
    )
    type: TypeName = Field(
        default="timestamptz",
        description="How the column is read: timestamptz, timestamp, date, iso8601, unix_s, "
        "unix_ms, unix_us, or a Python function as python:package.module:function.",
    )
    late_tolerance: Duration = Field(
        default="0",
        description="How far a change may be behind the newest of its table and still be put in "
        "order.",
    )
    idle_timeout: PositiveDuration = Field(
        default="30s",
        description="After how long without changes a table no longer holds the others back.",
    )
    safety_margin: Duration = Field(
        default="0",
        description="How far behind the slowest table changes are released, for clocks that "
        "differ.",
    )
    late_policy: Literal["drop", "deliver", "dead_letter"] = Field(
        default="deliver",
        description="What becomes of a change that comes too late for its place: it is counted "
        "and dropped, delivered out of order, or kept as a dead letter.",
    )
    emit_watermarks: Flag = Field(
        default=False,
        description="Whether the destination receives watermarks: how far event time has come. "
        "Not with parquet.",
    )
    leaf_partitions: Flag = Field(
        default=False,
        description="Whether each leaf of a partitioned table has a watermark of its own, where "
        "the publication shows leaves; else the table has one.",
    )
    max_buffer_bytes: Annotated[Size, Field(ge=BUFFER_BYTES_MIN, le=BUFFER_BYTES_MAX)] = Field(
        default=256 * 2**20,
        description="Most that is held back in memory; at it the sink stops reading until some is "
        "released, and nothing is dropped.",
    )
    on_stop: Literal["flush", "keep"] | None = Field(
        default=None,
        description="What a stop does with what is held back: flush delivers it in order, keep "
        "leaves it for the next start. If not given, flush, and keep with a window.",
    )
    tables: tuple[TimedTable, ...] = Field(
        default=(), description="Tables that differ from what is said above."
    )

    @model_validator(mode="after")
    def _each_table_once(self) -> Self:
        names = [table.name for table in self.tables]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise wrong("is there twice; name each table once", within=("tables", i, "name"))
        return self

    @model_validator(mode="after")
    def _commits_have_no_type(self) -> Self:
        _type_is_possible(self.column, "type" in self.model_fields_set)
        for i, table in enumerate(self.tables):
            _type_is_possible(table.column, table.type is not None, "tables", i)
        return self

    def check_columns(self) -> None:
        """Refuse it where the time of some table is not given."""
        if self.column is not None:
            return
        if not self.tables:
            raise wrong(
                "is required; name the column with the event time", within=("event_time", "column")
            )
        for i, table in enumerate(self.tables):
            if table.column is None:
                raise wrong(
                    "is required, because event_time.column is not given; give one of them",
                    within=("event_time", "tables", i, "column"),
                )

    def check_by_clock(self) -> None:
        """Refuse what has no meaning where the clock says how far time has come."""
        for key in type(self).model_fields:
            if key in self.model_fields_set and key not in _BY_CLOCK:
                raise wrong(
                    "has no meaning with ordering: processing_time, which takes the clock of "
                    "arrival; leave it out, or set ordering: event_time",
                    within=("event_time", key),
                )

    @property
    def columns_in_rows(self) -> list[str]:
        """The columns of tables that hold event times."""
        named = dict.fromkeys([self.column, *(table.column for table in self.tables)])
        return [column_in_row(name) for name in named if name and name not in _COMMIT_COLUMNS]

    @property
    def late_tolerance_us(self) -> int:
        return parse_duration(self.late_tolerance)

    @property
    def idle_timeout_us(self) -> int:
        return parse_duration(self.idle_timeout)

    @property
    def safety_margin_us(self) -> int:
        return parse_duration(self.safety_margin)

    def entry_of(self, schema: str, table: str, root: tuple[str, str] | None = None) -> int | None:
        """Which entry of ``tables`` holds for this table: its own, or else that of its root."""
        places = {(entry.name.schema, entry.name.table): i for i, entry in enumerate(self.tables)}
        own = places.get((schema, table))
        return own if own is not None or root is None else places.get(root)

    def of_table(
        self, schema: str, table: str, root: tuple[str, str] | None = None
    ) -> TableTime | None:
        """What holds for one table; None where nothing says which column has its time.

        A partition whose changes come under its own name has the table that it is part of as
        ``root``.
        """
        entry = self.entry_of(schema, table, root)
        own = None if entry is None else self.tables[entry]
        column = (own and own.column) or self.column
        if column is None:
            return None
        tolerance = parse_duration((own and own.late_tolerance) or self.late_tolerance)
        if column in _COMMIT_COLUMNS:
            return TableTime(column, BY_COMMIT, tolerance)
        return TableTime(column_in_row(column), (own and own.type) or self.type, tolerance)


def _sql(value: object) -> str:
    text = check_expression(value)
    if text == NONE or text.startswith(FUNCTION):
        raise wrong("should be an SQL expression")
    return text


def _named(expressions: dict[str, str]) -> dict[str, str]:
    for name in expressions:
        if not _NAME.fullmatch(name):
            raise wrong(
                "has a name that is not at most 63 letters, digits and _, beginning with a letter"
            )
    return expressions


Expressions = Annotated[dict[str, Annotated[str, BeforeValidator(_sql)]], AfterValidator(_named)]


class Window(Section):
    """Windows of event time: one message for each window and group, in place of the changes."""

    size: PositiveDuration = Field(description="How long a window is.")
    slide: PositiveDuration | None = Field(
        default=None,
        description="How far apart windows begin; size is a multiple of it. If not given, size: "
        "each change is then in one window.",
    )
    group_by: Expressions = Field(
        default_factory=dict,
        description="What has results of its own: a name and an expression, such as region: "
        "record.region.",
    )
    aggregates: Expressions = Field(
        min_length=1,
        description="What is computed: a name and an aggregate, such as total: sum(record.amount).",
    )

    @model_validator(mode="after")
    def _whole_slides(self) -> Self:
        if self.size_us % self.slide_us:
            raise wrong(
                "size is not a multiple of it; change one of them so that windows line up",
                within=("slide",),
            )
        if self.size_us // self.slide_us > WINDOWS_OF_A_ROW_MAX:
            raise wrong(
                f"puts each change into more than {WINDOWS_OF_A_ROW_MAX} windows; make it larger, "
                "or size smaller",
                within=("slide",),
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        taken = set(_RESERVED)
        for key, names in (("group_by", self.group_by), ("aggregates", self.aggregates)):
            for name in names:
                # Spark tells columns apart without regard to case.
                if name.lower() in taken:
                    raise wrong(
                        "is a name of this result already, small and capital letters being the "
                        "same; choose another",
                        within=(key, name),
                    )
                taken.add(name.lower())
        return self

    @property
    def size_us(self) -> int:
        return parse_duration(self.size)

    @property
    def slide_us(self) -> int:
        """How far apart windows begin; their size where they do not overlap."""
        return self.size_us if self.slide is None else parse_duration(self.slide)
