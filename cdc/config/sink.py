"""A sink: which changes of its databases go where, and in what order."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from cdc.config.backlog import MaxBacklog
from cdc.config.claim_check import ClaimCheck
from cdc.config.destination import (
    Destination,
    FileDestination,
    KafkaDestination,
    PostgresDestination,
    PullDestination,
    RedisStreamDestination,
    WebhookDestination,
)
from cdc.config.event_time import EventTime, Window
from cdc.config.expression import NONE, ExpressionText
from cdc.config.parquet import ParquetDestination
from cdc.config.scalars import Flag, Integer, Name, Section, Size, Table, Text, wrong
from cdc.config.sink_parts import GroupedTable, Retry, Source, StartAt

BOTH_WAYS: Final = "database and databases cannot both be given; keep one of them"

Action = Literal["insert", "update", "delete", "truncate", "message", "schema_change"]

_OF_TABLES: Final = ("insert", "update", "delete", "truncate", "schema_change")


class SinkConfig(Section):
    """A consumer of changes and its destination."""

    name: Name = Field(description="Name of the sink, and of the consumer in SQL.")
    database: Text = Field(
        description="Name of the database it reads; may be left out if there is only one, or if "
        "databases are given."
    )
    databases: tuple[Text, ...] | None = Field(
        default=None,
        min_length=1,
        description="Names of the databases it reads, in place of database; several only with "
        "ordering: event_time, which puts their changes into one order.",
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
        description="Which kinds of change it receives. If not given, those three; for delta, "
        "iceberg, postgres and parquet with columns: typed also truncate and schema_change.",
    )
    filter: ExpressionText = Field(
        default=NONE,
        description="Which changes pass: an expression that is true or false, the name of a Python "
        "function as python:package.module:function, or none. See docs/expressions.md.",
    )
    transform: ExpressionText = Field(
        default=NONE,
        description="What a message is: an expression whose JSON is sent in place of the shape's, "
        "a Python function, or none. Not with delta, iceberg, parquet and postgres, which write "
        "columns.",
    )
    routing: ExpressionText = Field(
        default=NONE,
        description="Where each message goes: an expression or a Python function that gives a "
        "stream key (redis_stream), a path (webhook), a topic (kafka) or a table (delta and "
        "iceberg with mode: append, typed parquet, postgres), null for the sink's own; or none.",
    )
    shape: Literal["sequin", "debezium", "record"] = Field(
        default="sequin",
        description="What a message looks like: sequin (record, changes, action, metadata), "
        "debezium (before, after, source, op) or record (the bare row). delta, iceberg, "
        "parquet and postgres write columns and take no other than sequin.",
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
    initial_backfill: Flag | tuple[Table, ...] = Field(
        default=False,
        description="Whether a new sink first gets the rows that exist already, of all its tables "
        "or of those in a list, as messages of the action read among the changes. See "
        "docs/backfill.md. Not with ordering: event_time or processing_time.",
    )
    batch_size: Annotated[Integer, Field(ge=1, le=10_000)] | None = Field(
        default=None,
        description="Most messages delivered at once; if not given, 10000 for delta, file, "
        "iceberg, kafka, parquet, postgres and pull, 1000 for redis_stream, 100 for webhook (1 "
        "with batch: false). delta, iceberg and parquet go by min_rows and max_delay_ms of their "
        "destination.",
    )
    partition_count: Annotated[Integer, Field(ge=1, le=64)] | None = Field(
        default=None,
        description="Over how many deliveries at once its groups are spread; the messages of one "
        "group stay in order. If not given, 8 for webhook in commit order, 1 otherwise. More than "
        "1 only for webhook, and not with ordering: event_time.",
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
        description="A larger message is oversize; if not given, what the destination can take.",
    )
    oversize: Literal["dead_letter", "claim_check"] = Field(
        default="dead_letter",
        description="What becomes of an oversize message: a dead letter at once, or, with "
        "claim_check, its content is stored elsewhere and the message carries a reference. The "
        "latter is for redis_stream and webhook and needs max_message_bytes.",
    )
    claim_check: ClaimCheck | None = Field(
        default=None,
        description="Where the content of oversize messages is stored, with oversize: claim_check.",
    )
    priority: Annotated[Integer, Field(ge=1, le=10)] = Field(
        default=5,
        description="Its weight when there is more to deliver than can be delivered; 10 gets ten "
        "times the share of 1.",
    )
    max_backlog: MaxBacklog | None = Field(
        default=None,
        description="A bound on what the log keeps for this sink; if not given, log.max_bytes "
        "alone bounds it, for all sinks together.",
    )
    ordering: Literal["commit", "event_time", "processing_time"] = Field(
        default="commit",
        description="In what order: commit, as the changes were committed; event_time, by a time "
        "that their rows carry; or processing_time, as they arrive, with watermarks and windows by "
        "the clock. The latter two are not for pull, nor with partition_count above 1.",
    )
    event_time: EventTime | None = Field(
        default=None,
        description="Which time counts; required with ordering: event_time. With processing_time "
        "only emit_watermarks, leaf_partitions and max_buffer_bytes.",
    )
    window: Window | None = Field(
        default=None,
        description="Results over windows of time in place of changes; only with ordering: "
        "event_time or processing_time, and not with parquet, transform, routing or another shape.",
    )
    destination: Destination = Field(description="Where it delivers to.")

    @model_validator(mode="before")
    @classmethod
    def _first_database(cls, data: object) -> object:
        if not isinstance(data, dict) or data.get("databases") is None:
            return data
        if data.get("database") is not None:
            return data
        names = data["databases"]
        first = names[0] if isinstance(names, list | tuple) and names else None
        # Names that are not usable are one problem, not one more for database.
        return {**data, "database": first if isinstance(first, str) and first else "unnamed"}

    @model_validator(mode="before")
    @classmethod
    def _clock_needs_no_section(cls, data: object) -> object:
        if not isinstance(data, dict) or data.get("ordering") != "processing_time":
            return data
        return {**data, "event_time": {}} if data.get("event_time") is None else data

    @model_validator(mode="before")
    @classmethod
    def _tables_take_every_change(cls, data: object) -> object:
        if not isinstance(data, dict) or data.get("actions") is not None:
            return data
        to = data.get("destination")
        if isinstance(to, dict):
            said = (to.get("type"), to.get("columns") or "typed")
            of_tables = said[0] in ("postgres", "delta", "iceberg") or said == ("parquet", "typed")
        else:
            of_tables = isinstance(to, PostgresDestination) or getattr(to, "takes_texts", False)
        return {**data, "actions": _OF_TABLES} if of_tables else data

    @model_validator(mode="after")
    def _one_way_to_name_databases(self) -> Self:
        # A file with both is refused where names are; a copy of a valid sink has both.
        if self.databases is not None and self.databases[0] != self.database:
            raise wrong(BOTH_WAYS, within=("databases",))
        return self

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
        if self.destination.writes_columns and self.shape != "sequin":
            raise wrong(
                f"{self.destination.type} writes columns, not messages, so there is nothing to "
                "shape; leave it out",
                within=("shape",),
            )
        return self

    @model_validator(mode="after")
    def _schemas_are_known(self) -> Self:
        if not isinstance(self.destination, KafkaDestination) or not self.destination.schemas:
            return self
        for key, fits in (
            ("shape", self.shape == "debezium"),
            ("transform", self.transform == NONE),
            ("tables", not self.tables),
            ("ordering", self.ordering == "commit"),
        ):
            if not fits:
                raise wrong(
                    "does not go with schemas: true, which describes the debezium shape and the "
                    "primary key of changes in commit order; change one of them",
                    within=(key,),
                )
        return self

    @model_validator(mode="after")
    def _expressions_are_possible(self) -> Self:
        if self.transform != NONE and self.destination.writes_columns:
            raise wrong(
                f"{self.destination.type} writes columns, not messages, so there is nothing to "
                "transform; leave it out, or use another destination",
                within=("transform",),
            )
        places = FileDestination | ParquetDestination | PullDestination
        one_place = isinstance(self.destination, places) and not self.destination.takes_texts
        if self.routing != NONE and one_place:
            raise wrong(
                f"{self.destination.type} has one place for all messages, so there is nothing to "
                "route to; leave it out, or use kafka, postgres, redis_stream or webhook",
                within=("routing",),
            )
        return self

    @model_validator(mode="after")
    def _order_is_given(self) -> Self:
        if self.ordering == "commit":
            for key in ("event_time", "window"):
                if getattr(self, key) is not None:
                    raise wrong(
                        "has a meaning with ordering: event_time or processing_time alone; set "
                        "one of them, or leave it out",
                        within=(key,),
                    )
            if len(self.sources) > 1:
                raise wrong(
                    "names several, and commits of different databases have no order among them; "
                    "name one, or set ordering: event_time",
                    within=("databases",),
                )
        elif self.event_time is None:
            raise wrong(
                "is required with ordering: event_time; name at least its column",
                within=("event_time",),
            )
        elif self.ordering == "event_time":
            self.event_time.check_columns()
        else:
            self.event_time.check_by_clock()
        return self

    @model_validator(mode="after")
    def _destination_keeps_the_order(self) -> Self:
        if self.ordering == "commit":
            return self
        if isinstance(self.destination, PullDestination):
            raise wrong(
                f"{self.ordering} is not possible with pull yet; use another destination, or "
                "commit",
                within=("ordering",),
            )
        if isinstance(self.destination, RedisStreamDestination) and self.destination.max_age_s:
            raise wrong(
                f"needs entries in the order of their commits, which {self.ordering} does not "
                "keep; use max_length",
                within=("destination", "max_age_s"),
            )
        if self.initial_backfill:
            raise wrong(
                f"rows that exist already have no place in the order of {self.ordering}; leave it "
                "out, or set ordering: commit",
                within=("initial_backfill",),
            )
        if "schema_change" in self.actions:
            raise wrong(
                f"schema_change has its place between commits, which {self.ordering} does not "
                "keep; take it to a sink of its own",
                within=("actions",),
            )
        return self

    @model_validator(mode="after")
    def _tables_are_possible(self) -> Self:
        destination = self.destination
        if not destination.takes_texts and not isinstance(destination, PostgresDestination):
            return self
        mode = getattr(destination, "mode", "append")
        if self.ordering != "commit":
            raise wrong(
                f"{self.ordering} is not possible with {destination.type}, whose tables follow the "
                "order of commits; use another destination, or commit",
                within=("ordering",),
            )
        if mode != "events" and "message" in self.actions:
            events = "use mode: events, or " if destination.type == "postgres" else ""
            raise wrong(f"message belongs to no table; {events}take it out", within=("actions",))
        if mode in ("events", "upsert") and self.routing != NONE:
            tables = "one table for all messages" if mode == "events" else "a table per table"
            raise wrong(f"mode: {mode} has {tables}; leave it out", within=("routing",))
        if mode in ("mirror", "upsert") and "truncate" not in self.actions:
            raise wrong(
                f"needs truncate with mode: {mode}, or its tables would keep rows that the source "
                "has not; add it",
                within=("actions",),
            )
        return self

    @model_validator(mode="after")
    def _partitions_are_possible(self) -> Self:
        if (self.partition_count or 1) == 1:
            return self
        if not self.destination.defers:
            raise wrong(
                f"above 1 is impossible with {self.destination.type}, which knows by the last "
                "message what it has and so needs all of them in one order; leave it out, or use "
                "webhook",
                within=("partition_count",),
            )
        if self.ordering != "commit":
            raise wrong(
                f"above 1 would lose the order of {self.ordering}; leave it out, or set ordering: "
                "commit",
                within=("partition_count",),
            )
        return self

    @model_validator(mode="after")
    def _references_are_possible(self) -> Self:
        if self.oversize == "dead_letter":
            if self.claim_check is not None:
                raise wrong(
                    "has a meaning with oversize: claim_check alone; set that, or leave it out",
                    within=("claim_check",),
                )
        elif not self.destination.takes_references:
            raise wrong(
                f"claim_check is not possible with {self.destination.type}; leave it out, or use "
                "redis_stream or webhook",
                within=("oversize",),
            )
        elif self.effective_max_message_bytes is None:
            raise wrong(
                "is required with oversize: claim_check; say from which size on",
                within=("max_message_bytes",),
            )
        return self

    @model_validator(mode="after")
    def _window_is_possible(self) -> Self:
        event_time = self.event_time
        parquet = isinstance(self.destination, ParquetDestination)
        if parquet and event_time is not None and event_time.emit_watermarks:
            raise wrong(
                "parquet writes rows of tables, and a watermark is none; leave it out, or use "
                "another destination",
                within=("event_time", "emit_watermarks"),
            )
        if self.window is None:
            return self
        if parquet:
            raise wrong(
                "parquet writes rows of tables, and results of windows are none; use another "
                "destination",
                within=("window",),
            )
        for key, empty in (("transform", NONE), ("routing", NONE), ("shape", "sequin")):
            if getattr(self, key) != empty:
                raise wrong(
                    "is not possible with a window, whose messages are its results; leave it out",
                    within=(key,),
                )
        if event_time is not None and event_time.on_stop == "flush":
            raise wrong(
                "flush would send results of windows that are not complete; leave it out, or "
                "write keep",
                within=("event_time", "on_stop"),
            )
        return self

    @property
    def in_time_order(self) -> bool:
        """Whether it has a watermark: by event time or by processing time."""
        return self.ordering != "commit"

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of all databases that it reads."""
        return self.databases or (self.database,)

    @property
    def flushes_on_stop(self) -> bool:
        """Whether a stop delivers what is held back for its order."""
        on_stop = None if self.event_time is None else self.event_time.on_stop
        return on_stop == "flush" if on_stop is not None else self.window is None

    @property
    def rewind_ways(self) -> tuple[str, ...]:
        """What a rewind can do with what its destination holds.

        Places that a routing names are not known, so they cannot be emptied. A destination
        that keeps no position gets everything again as it is.
        """
        keeps_position = self.destination.place(self.name) is not None
        ways = self.destination.rewind_ways if keeps_position else ()
        return ways if self.routing == NONE else tuple(way for way in ways if way != "truncate")

    @property
    def reload_refusal(self) -> str | None:
        """Why its tables cannot be reloaded; None if they can.

        A table that is swapped must have the rows of one table of the source, and all of them.
        """
        if self.in_time_order:
            return "it is in the order of event time or processing time"
        if self.routing != NONE:
            return "its routing decides which table a row goes to"
        return self.destination.reload_refusal

    @property
    def claims(self) -> ClaimCheck | None:
        """Where the content of oversize messages goes; None if they become dead letters."""
        return self.claim_check or ClaimCheck() if self.oversize == "claim_check" else None

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
    def effective_partition_count(self) -> int:
        """``partition_count``, or else the destination's default; 1 in any order but commit."""
        if self.partition_count is not None or self.ordering != "commit":
            return self.partition_count or 1
        return self.destination.default_partition_count

    @property
    def effective_max_message_bytes(self) -> int | None:
        """``max_message_bytes``, or else what the destination can take; None without a bound."""
        return self.max_message_bytes or self.destination.message_bytes_max
