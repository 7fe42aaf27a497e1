"""A source database: how to reach it, and which slot and publication to read."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from cdc.config.scalars import (
    Flag,
    Integer,
    LocalPath,
    Name,
    Port,
    Section,
    SlotName,
    Table,
    Text,
    resolve,
    wrong,
)
from cdc.config.secrets import SecretText

_SECRET_PARAMETERS = ("password", "sslpassword", "oauth_client_secret")
_PARTS = ("hostname", "port", "database", "username", "password")


def _certificate(value: object, info: ValidationInfo) -> str:
    # libpq reads the word system as the operating system's own certificates.
    return "system" if value == "system" else str(resolve(value, info))


def _postgres_url(url: SecretText) -> SecretText:
    text = url.get_secret_value()
    try:
        ports = str(conninfo_to_dict(text).get("port", "")).split(",")
        readable = all(port.isdigit() or not port for port in ports)
    except psycopg.Error:
        readable = False
    if not readable or not text.startswith(("postgres://", "postgresql://")):
        raise wrong("should be a URL such as postgres://user:password@host:5432/database")
    return url


PostgresUrl = Annotated[SecretText, AfterValidator(_postgres_url)]


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
        description="Tables of a publication that is created. If not given, those of the schema "
        "public, later ones included, which only a superuser may ask for; before Postgres 15, "
        "all tables.",
    )


class Database(Section):
    """A source database."""

    name: Name = Field(description="Name by which sinks refer to this database.")
    url: PostgresUrl | None = Field(
        default=None, description="Connection URL, in place of the five keys that follow."
    )
    hostname: Text = Field(default="localhost", description="Host of the server.")
    port: Port = Field(default=5432, description="Port of the server.")
    database: Text | None = Field(
        default=None, description="Name of the database on the server; required without url."
    )
    username: Text | None = Field(
        default=None, description="User to connect as; if not given, libpq's own default."
    )
    password: SecretText | None = Field(
        default=None,
        description="Password; if not given, libpq looks at PGPASSWORD and the password file.",
    )
    sslmode: Literal["disable", "prefer", "require", "verify-ca", "verify-full"] | None = Field(
        default=None, description="How far TLS is required; if not given, libpq's own default."
    )
    sslrootcert: Annotated[str, BeforeValidator(_certificate)] | None = Field(
        default=None,
        description="File of trusted certificates, or system for the operating system's.",
    )
    sslcert: LocalPath | None = Field(
        default=None, description="File of the client's own certificate."
    )
    sslkey: LocalPath | None = Field(
        default=None, description="File of the private key of the client's certificate."
    )
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

    @model_validator(mode="after")
    def _one_way_to_connect(self) -> Self:
        self.refuse_together("url", _PARTS)
        if self.url is None and self.database is None:
            raise wrong("needs url or database; give one of them")
        return self

    def dsn(self) -> str:
        """A libpq connection string, password included."""
        tls = {
            "sslmode": self.sslmode,
            "sslrootcert": self.sslrootcert,
            "sslcert": str(self.sslcert) if self.sslcert else None,
            "sslkey": str(self.sslkey) if self.sslkey else None,
        }
        if self.url is not None:
            return make_conninfo(self.url.get_secret_value(), **tls)
        return make_conninfo(
            "",
            host=self.hostname,
            port=self.port,
            dbname=self.database,
            user=self.username,
            password=self.password.get_secret_value() if self.password else None,
            **tls,
        )

    def primary_dsn(self) -> str | None:
        """How to reach the primary of a standby, password included; None if none is named."""
        return None if self.primary_url is None else self.primary_url.get_secret_value()

    def display_dsn(self) -> str:
        """The connection string without its secrets."""
        parameters = conninfo_to_dict(self.dsn())
        shown = {k: v for k, v in parameters.items() if k not in _SECRET_PARAMETERS}
        return make_conninfo("", **shown)
