"""Parts of a sink: which tables it takes, how it groups their changes, and how it retries."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.scalars import Integer, Section, Table, Text, wrong
from cdc.cursor import Cursor
from cdc.errors import OperatorError


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

    def takes(self, schema: str, table: str) -> bool:
        """Whether the changes of a table are the sink's."""
        name = f"{schema}.{table}"
        return (
            (self.include_schemas is None or schema in self.include_schemas)
            and schema not in (self.exclude_schemas or ())
            and (self.include_tables is None or name in self.include_tables)
            and name not in (self.exclude_tables or ())
        )


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
