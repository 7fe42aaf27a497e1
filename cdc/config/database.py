"""A source database: how to reach it, and which slot and publication to read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdc.config.postgres import PostgresServer, PostgresUrl
from cdc.config.scalars import Flag, Integer, Name, Section, SlotName, Table, Text


class Slot(Section):
    """The logical replication slot."""

    name: SlotName = Field(description="Name of the replication slot.")
    create_if_not_exists: Flag = Field(
        default=False, description="Create the slot at start if it is not there."
    )
    failover: Flag = Field(
        default=False,
        description="Create the slot so that standbys keep a copy of it (Postgres 17 and later).",
    )
    two_phase: Flag = Field(
        default=False,
        description="Receive prepared transactions when they are prepared, not when they are "
        "committed (Postgres 15 and later). They are delivered once committed either way.",
    )


class Publication(Section):
    """The publication that says which tables are read."""

    name: Text = Field(max_length=63, description="Name of the publication.")
    create_if_not_exists: Flag = Field(
        default=False, description="Create the publication at start if it is not there."
    )
    init_sql: Text | None = Field(
        default=None, description="The statement that creates the publication, in place of ours."
    )
    tables: tuple[Table, ...] | None = Field(
        default=None,
        min_length=1,
        description="Tables of a publication that is created; when the list changes, walbrook "
        "config apply alters the publication. If not given, those of the schema "
        "public, later ones included, which only a superuser may ask for; before Postgres 15, "
        "all tables.",
    )


class _Named(Section):
    """What has a name in the file."""

    name: Name = Field(description="Name by which sinks refer to this database.")


class Database(PostgresServer, _Named):
    """A source database."""

    slot: Slot = Field(description="The replication slot to read.")
    publication: Publication = Field(description="The publication to read.")

    stream_transactions: Flag = Field(
        default=True,
        description="Receive large transactions while they are still open. They wait in the log "
        "directory, in at most half of log.max_bytes beside it, and are delivered once committed.",
    )
    origin: Literal["any", "none"] = Field(
        default="any",
        description="With none, changes that replication brought into the source are left out "
        "(Postgres 16 and later).",
    )
    heartbeat_s: Annotated[Integer, Field(ge=0, le=3600)] = Field(
        default=10,
        description="How often a small message is sent through the WAL to see that it comes back, "
        "in seconds; 0 sends none.",
    )
    primary_url: PostgresUrl | None = Field(
        default=None,
        description="URL of the primary, when the database named here is a standby: heartbeats "
        "are written there.",
    )

    def primary_dsn(self) -> str | None:
        """How to reach the primary of a standby, password included; None if none is named."""
        return None if self.primary_url is None else self.primary_url.get_secret_value()
