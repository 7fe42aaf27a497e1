"""How to reach a Postgres database: a URL or its parts, and TLS."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from cdc.config.scalars import LocalPath, Port, Section, Text, resolve, wrong
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


class PostgresServer(Section):
    """A database on a server, and who connects to it."""

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

    def display_dsn(self) -> str:
        """The connection string without its secrets."""
        parameters = conninfo_to_dict(self.dsn())
        shown = {k: v for k, v in parameters.items() if k not in _SECRET_PARAMETERS}
        return make_conninfo("", **shown)
