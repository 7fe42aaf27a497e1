"""How a sink orders changes by a time that their rows carry, and the windows over that time.

What must always hold: a table that has an entry of its own under ``tables`` takes from it what it
gives and all else from the section around it. Durations are kept as the file writes them; the
properties that end in ``_us`` are the same in whole microseconds.
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
    type: str
    late_tolerance_us: int


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
        description="The column with the event time; required unless every table under tables has "
        "one.",
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
        description="Whether the destination is told how far event time has come. Not with "
        "parquet.",
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
    def _a_column_for_each(self) -> Self:
        if self.column is not None:
            return self
        if not self.tables:
            raise wrong("is required; name the column with the event time", within=("column",))
        for i, table in enumerate(self.tables):
            if table.column is None:
                raise wrong(
                    "is required, because event_time.column is not given; give one of them",
                    within=("tables", i, "column"),
                )
        return self

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
        tolerance = (own and own.late_tolerance) or self.late_tolerance
        return TableTime(column, (own and own.type) or self.type, parse_duration(tolerance))


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
