"""Where the tables of a lake lie, and how they are written."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.destination_section import DestinationSection
from cdc.config.scalars import Flag, Integer, LocalPath, Section, Size, Text, wrong
from cdc.config.secrets import SecretText
from cdc.config.table_template import TableTemplate, refusal_of_template

TYPED_ROWS: Final = 200_000
TYPED_BYTES: Final = 256 * 2**20
"""What a sink with typed columns is handed at once, at most and about: a file per table."""

_SCHEMES = ("s3://", "s3a://", "gs://", "az://", "abfs://", "abfss://", "adl://")


_AZURE_ACCOUNT = re.compile(r"abfss?://[^/:@]+@[^/:@]+(/|$)")
"""A container and its account, as in abfss://container@account.dfs.core.windows.net/folder."""


def _store_url(url: str) -> str:
    has_login = "@" in url.partition("://")[2].split("/")[0] and not _AZURE_ACCOUNT.match(url)
    if not url.startswith(_SCHEMES) or "?" in url or has_login:
        raise wrong(
            "should be a URL such as s3://bucket/folder; credentials and other options belong in "
            "storage_options or the environment"
        )
    return url.rstrip("/")


def _table_of_its_own(template: str) -> str:
    if "{table}" not in template:
        raise wrong("should hold {table}: every table of the source has one of its own")
    return template


class LakehouseMaintenance(Section):
    """What is done for the tables beside deliveries."""

    enabled: Flag = Field(
        default=True,
        description="Merge small files, and remove files that no version of the last retain_hours "
        "has; false: another tool does.",
    )
    interval_s: Annotated[Integer, Field(ge=1, le=86_400)] = Field(
        default=600, description="How often tables that changed are looked at, in seconds."
    )
    target_file_bytes: Annotated[Size, Field(ge=2**20, le=2**30)] = Field(
        default=32 * 2**20,
        description="Size up to which files are merged; files of half of it and more are left "
        "alone. Memory for a merge grows with it.",
    )
    retain_hours: Annotated[Integer, Field(ge=1, le=87_600)] = Field(
        default=168,
        description="How long files that are no more in the table are kept, for readers of older "
        "versions.",
    )


class GatheredFiles(Section):
    """Files that are not written before there is enough for them."""

    min_rows: Annotated[Integer, Field(ge=1, le=10_000_000)] = Field(
        default=100_000,
        description="Changes of the source that are waited for before files are written, so that "
        "these are not small.",
    )
    max_delay_ms: Annotated[Integer, Field(ge=0, le=3_600_000)] = Field(
        default=10_000, description="How long they are waited for at most, in milliseconds."
    )


class StoredTables(Section):
    """A folder or a URL below which each table of the source has a table."""

    path: LocalPath | None = Field(
        default=None, description="Directory of the tables; this or url is required."
    )
    url: Annotated[Text, AfterValidator(_store_url)] | None = Field(
        default=None,
        description="Place of the tables in an object store, such as s3://bucket/folder, "
        "gs://bucket/folder or abfss://container@account.dfs.core.windows.net/folder.",
    )
    storage_options: dict[str, SecretText] = Field(
        default_factory=dict,
        description="Options of the object store by name, such as AWS_REGION or "
        "AWS_ENDPOINT_URL; what is not given is taken from the environment.",
    )
    table: Annotated[TableTemplate, AfterValidator(_table_of_its_own)] = Field(
        default="{schema}.{table}",
        description="Name of the target table, which is a folder per part; {schema} and {table} "
        "stand for those of the source.",
    )
    maintenance: LakehouseMaintenance = Field(
        default_factory=LakehouseMaintenance,
        description="What is done for the tables beside deliveries.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        self.refuse_together("path", ("url",))
        if self.path is None and self.url is None:
            raise wrong("needs path or url; give one of them")
        if self.storage_options and self.url is None:
            raise wrong("has no use with path; leave it out", within=("storage_options",))
        return self

    @property
    def root(self) -> str:
        """The place as text."""
        return self.url if self.url is not None else str(self.path)

    def options(self) -> dict[str, str]:
        """The options of the store in the clear."""
        return {name: value.get_secret_value() for name, value in self.storage_options.items()}

    def place(self, _consumer: str) -> tuple[object, ...] | None:
        """What no other sink may share with this one."""
        return ("directory", self.path) if self.path is not None else ("store", self.url)


class LakehouseTables(GatheredFiles, StoredTables):
    """Tables of a format that has transactions."""

    mode: Literal["append", "upsert"] = Field(
        default="append",
        description="append: every change as a row of its table's history. upsert: the rows as "
        "they are now, merged by key.",
    )
    partition_by: Literal["date", "none"] = Field(
        default="date",
        description="How tables of mode append are partitioned: by the date of the commit, or "
        "not at all. Those of mode upsert have no partitions.",
    )

    @model_validator(mode="after")
    def _partitions_of_histories(self) -> Self:
        if self.mode == "upsert" and "partition_by" in self.model_fields_set:
            raise wrong(
                "has a meaning with mode: append alone; leave it out", within=("partition_by",)
            )
        return self


class IcebergCatalog(Section):
    """Where readers find the tables, by their names."""

    type: Literal["sql", "rest", "glue", "hive"] = Field(
        default="sql",
        description="sql: two tables of a database. rest, glue, hive: a server of that kind.",
    )
    name: Annotated[Text, Field(min_length=1, max_length=200)] | None = Field(
        default=None,
        description="Name of the catalog, of which a database may have several; if not given, the "
        "name of the sink.",
    )
    uri: SecretText | None = Field(
        default=None,
        description="URL of the catalog. If not given, sql is the schema walbrook of the state "
        "database; rest and hive need one.",
    )
    options: dict[str, SecretText] = Field(
        default_factory=dict,
        description="More properties of the catalog by their names in pyiceberg, such as token, "
        "credential or warehouse.",
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.type in ("rest", "hive") and self.uri is None:
            raise wrong(f"is needed with type: {self.type}; add it", within=("uri",))
        return self

    def properties(self) -> dict[str, str]:
        """All of them in the clear."""
        found = {name: value.get_secret_value() for name, value in self.options.items()}
        if self.uri is not None:
            found["uri"] = self.uri.get_secret_value()
        return {**found, "type": self.type}


class LakeDestination(LakehouseTables, DestinationSection):
    """Tables of a lakehouse, whatever their format."""

    rewind_ways: ClassVar[tuple[str, ...]] = ("new_generation",)
    writes_columns: ClassVar[bool] = True

    @property
    def delivery_rows(self) -> int:
        return TYPED_ROWS

    @property
    def delivery_bytes(self) -> int:
        return TYPED_BYTES

    @property
    def default_batch_size(self) -> int:
        return 10_000

    @property
    def takes_texts(self) -> bool:
        return True

    @property
    def holds_tables(self) -> bool:
        return True

    @property
    def reload_refusal(self) -> str | None:
        return refusal_of_template(self.table)


class DeltaDestination(LakeDestination):
    """Tables of Delta Lake."""

    type: Literal["delta"] = Field(default="delta", description="Always delta.")


class IcebergDestination(LakeDestination):
    """Tables of Apache Iceberg."""

    type: Literal["iceberg"] = Field(default="iceberg", description="Always iceberg.")
    merge: Literal["on_read", "copy_on_write"] = Field(
        default="on_read",
        description="How mode upsert replaces rows: on_read writes which keys are deleted, and "
        "readers leave their older rows out; copy_on_write rewrites files that hold a touched key, "
        "for engines that do not read equality deletes.",
    )
    catalog: IcebergCatalog = Field(
        default_factory=IcebergCatalog, description="Where readers find the tables by name."
    )

    @model_validator(mode="after")
    def _has_a_url_of_its_library(self) -> Self:
        if self.url is not None and self.url.startswith(("az://", "adl://")):
            raise wrong(
                "should be abfss://container@account.dfs.core.windows.net/folder: readers of "
                "Iceberg know no other URLs of Azure",
                within=("url",),
            )
        return self

    @model_validator(mode="after")
    def _merges_rows(self) -> Self:
        if self.mode == "append" and "merge" in self.model_fields_set:
            raise wrong("has a meaning with mode: upsert alone; leave it out", within=("merge",))
        return self
