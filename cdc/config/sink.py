"""A sink: which changes of a database go where."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.destination import (
    Destination,
    FileDestination,
    ParquetDestination,
    PullDestination,
    WebhookDestination,
)
from cdc.config.expression import NONE, ExpressionText
from cdc.config.scalars import Flag, Integer, Name, Section, Size, Table, Text, wrong
from cdc.cursor import Cursor
from cdc.errors import OperatorError

Action = Literal["insert", "update", "delete", "truncate", "message", "schema_change"]


def _start_at(value: str) -> str:
    if value in ("restart", "earliest", "latest"):
        return value
    try:
        return str(Cursor.parse(value))
    except OperatorError:
        raise wrong(
            "should be restart, earliest, latest or a cursor such as 16/B374D848:0"
        ) from None


StartAt = Annotated[str, AfterValidator(_start_at)]


class Source(Section):
    """Which tables a sink takes changes from."""

    include_schemas: tuple[Text, ...] | None = Field(
        default=None, min_length=1, description="Only these schemas."
    )
    exclude_schemas: tuple[Text, ...] | None = Field(
        default=None, min_length=1, description="All schemas but these."
    )
    include_tables: tuple[Table, ...] | None = Field(
        default=None, min_length=1, description="Only these tables."
    )
    exclude_tables: tuple[Table, ...] | None = Field(
        default=None, min_length=1, description="All tables but these."
    )

    @model_validator(mode="after")
    def _include_or_exclude(self) -> Self:
        for kind in ("schemas", "tables"):
            self.refuse_together(f"include_{kind}", (f"exclude_{kind}",))
        return self


class GroupedTable(Section):
    """How the changes of one table are grouped."""

    name: Table = Field(description="The table.")
    group_column_names: tuple[Text, ...] = Field(
        min_length=1,
        description="Changes with the same values in these columns form a group and stay in order.",
    )


class Retry(Section):
    """How a message that its destination refused is tried again."""

    first_ms: Annotated[Integer, Field(ge=1, le=3_600_000)] = Field(
        default=1_000,
        description="Pause before the second delivery, in milliseconds; it doubles each time. One "
        "refused for its content waits ten times as long.",
    )
    max_ms: Annotated[Integer, Field(ge=1, le=86_400_000)] = Field(
        default=600_000, description="Longest pause between two deliveries, in milliseconds."
    )

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.max_ms < self.first_ms:
            raise wrong("max_ms is less than first_ms; raise it", within=("max_ms",))
        return self


class Sink(Section):
    """A consumer of changes and its destination."""

    name: Name = Field(description="Name of the sink, and of the consumer in SQL.")
    database: Text = Field(
        description="Name of the database it reads; may be left out if there is only one."
    )
    status: Literal["active", "disabled"] = Field(
        default="active", description="A disabled sink receives nothing."
    )
    source: Source = Field(
        default_factory=Source, description="Which tables; all of the publication if not given."
    )
    actions: tuple[Action, ...] = Field(
        default=("insert", "update", "delete"),
        min_length=1,
        description="Which kinds of change it receives.",
    )
    filter: ExpressionText = Field(
        default=NONE,
        description="Which changes pass: an expression that is true or false, the name of a Python "
        "function as python:package.module:function, or none. See docs/expressions.md.",
    )
    transform: ExpressionText = Field(
        default=NONE,
        description="What a message is: an expression whose JSON is sent in place of the shape's, "
        "a Python function, or none. Not with parquet, which writes columns.",
    )
    routing: ExpressionText = Field(
        default=NONE,
        description="Where each message goes: an expression or a Python function that gives a "
        "stream key (redis_stream) or a path (webhook), null for the sink's own; or none.",
    )
    shape: Literal["sequin", "debezium", "record"] = Field(
        default="sequin",
        description="What a message looks like: sequin (record, changes, action, metadata), "
        "debezium (before, after, source, op) or record (the bare row). parquet writes columns and "
        "takes no other than sequin.",
    )
    timestamp_format: Literal["iso8601", "unix_microsecond", "postgres"] = Field(
        default="iso8601",
        description="How timestamps are written: 2026-01-02T01:04:05.6Z, as a whole number of "
        "microseconds since 1970, or in the server's own text.",
    )
    number_format: Literal["number", "string"] = Field(
        default="number",
        description="How bigint and numeric are written, alone and in arrays: as JSON numbers with "
        "every digit, or as strings for readers that would round them.",
    )
    start_at: StartAt = Field(
        default="restart",
        description="Where a new sink begins: restart (where its database's oldest sink stands), "
        "earliest (the first change that the change log still has), latest (what comes from now "
        "on) or a cursor such as 16/B374D848:0. One that has begun goes on at its cursor.",
    )
    batch_size: Annotated[Integer, Field(ge=1, le=10_000)] | None = Field(
        default=None,
        description="Most messages delivered at once; if not given, 10000 for file, parquet and "
        "pull, 1000 for redis_stream, 100 for webhook (1 with batch: false).",
    )
    message_grouping: Flag = Field(
        default=True,
        description="Whether changes of one row, by its primary key, form a group that stays in "
        "order; false: every message is for itself.",
    )
    tables: tuple[GroupedTable, ...] = Field(
        default=(), description="Tables whose changes are grouped by other columns than the key."
    )
    max_deliveries: Annotated[Integer, Field(ge=1, le=1_000)] = Field(
        default=20,
        description="How often a message is delivered before it becomes a dead letter and its "
        "group goes on.",
    )
    retry: Retry = Field(
        default_factory=Retry, description="The pauses between deliveries of a refused message."
    )
    max_message_bytes: Annotated[Size, Field(ge=1_000)] | None = Field(
        default=None,
        description="A larger message becomes a dead letter at once; if not given, what the "
        "destination can take.",
    )
    priority: Annotated[Integer, Field(ge=1, le=10)] = Field(
        default=5,
        description="Its weight when there is more to deliver than can be delivered; 10 gets ten "
        "times the share of 1.",
    )
    destination: Destination = Field(description="Where it delivers to.")

    @model_validator(mode="after")
    def _groups_are_possible(self) -> Self:
        if self.tables and not self.message_grouping:
            raise wrong(
                "groups by columns, but message_grouping is false; take one of them out",
                within=("tables",),
            )
        names = [table.name for table in self.tables]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise wrong("is there twice; name each table once", within=("tables", i, "name"))
        return self

    @model_validator(mode="after")
    def _batch_size_is_possible(self) -> Self:
        single = isinstance(self.destination, WebhookDestination) and not self.destination.batch
        if single and self.effective_batch_size > 1:
            raise wrong("batch_size above 1 is impossible with batch: false; change one of them")
        return self

    @model_validator(mode="after")
    def _shape_is_possible(self) -> Self:
        if isinstance(self.destination, ParquetDestination) and self.shape != "sequin":
            raise wrong(
                "parquet writes columns, not messages, so there is nothing to shape; leave it out",
                within=("shape",),
            )
        return self

    @model_validator(mode="after")
    def _expressions_are_possible(self) -> Self:
        if self.transform != NONE and isinstance(self.destination, ParquetDestination):
            raise wrong(
                "parquet writes columns, not messages, so there is nothing to transform; leave it "
                "out, or use another destination",
                within=("transform",),
            )
        if self.routing != NONE and isinstance(
            self.destination, FileDestination | ParquetDestination | PullDestination
        ):
            raise wrong(
                f"{self.destination.type} has one place for all messages, so there is nothing to "
                "route to; leave it out, or use redis_stream or webhook",
                within=("routing",),
            )
        return self

    @property
    def expressions(self) -> dict[str, str]:
        """The expressions that are given, by their key."""
        given = {"filter": self.filter, "transform": self.transform, "routing": self.routing}
        return {key: text for key, text in given.items() if text != NONE}

    @property
    def effective_batch_size(self) -> int:
        """``batch_size``, or else the destination's default."""
        return self.batch_size or self.destination.default_batch_size

    @property
    def effective_max_message_bytes(self) -> int | None:
        """``max_message_bytes``, or else what the destination can take; None without a bound."""
        return self.max_message_bytes or self.destination.message_bytes_max
