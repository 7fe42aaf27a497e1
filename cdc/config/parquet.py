"""Where Parquet files lie, and what their columns are."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from cdc.config.destination_section import DestinationSection
from cdc.config.lakehouse import (
    TYPED_BYTES,
    TYPED_ROWS,
    GatheredFiles,
    StoredTables,
)
from cdc.config.scalars import wrong

_OF_TYPED = ("url", "table", "maintenance")
_JSON_ROWS = 50_000


class ParquetDestination(GatheredFiles, StoredTables, DestinationSection):
    """Parquet files in partition directories."""

    rewind_ways: ClassVar[tuple[str, ...]] = ("new_generation", "truncate")
    writes_columns: ClassVar[bool] = True

    type: Literal["parquet"] = Field(default="parquet", description="Always parquet.")
    columns: Literal["typed", "json"] = Field(
        default="typed",
        description="typed: a folder per table with its own columns and a manifest of its files. "
        "json: one folder in which all changes have the same columns, with rows as JSON.",
    )
    partition_by: tuple[Literal["table", "date", "action"], ...] = Field(
        default=("table", "date"),
        description="Directory levels, outermost first; may be empty. With columns: typed the "
        "first one is table.",
    )
    compression: Literal["zstd", "snappy", "gzip", "none"] = Field(
        default="zstd", description="Compression of the columns."
    )

    @model_validator(mode="after")
    def _fits_its_columns(self) -> Self:
        if len(set(self.partition_by)) < len(self.partition_by):
            raise wrong("partition_by names a level twice; name each once")
        if self.columns == "typed" and self.partition_by[:1] != ("table",):
            raise wrong(
                "should begin with table: tables have columns of their own; or use columns: json",
                within=("partition_by",),
            )
        given = [name for name in _OF_TYPED if name in self.model_fields_set]
        if self.columns == "json" and given:
            raise wrong("has a meaning with columns: typed alone; leave it out", within=(given[0],))
        return self

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels below the folder of a typed table."""
        return self.partition_by[1:]

    @property
    def delivery_rows(self) -> int:
        return TYPED_ROWS if self.columns == "typed" else _JSON_ROWS

    @property
    def delivery_bytes(self) -> int:
        return TYPED_BYTES if self.columns == "typed" else super().delivery_bytes

    @property
    def reload_refusal(self) -> str | None:
        return None if self.columns == "typed" else super().reload_refusal

    @property
    def takes_texts(self) -> bool:
        return self.columns == "typed"

    @property
    def holds_tables(self) -> bool:
        return True

    @property
    def default_batch_size(self) -> int:
        return 10_000
