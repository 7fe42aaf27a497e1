"""The section of the change log: batches, segments, how long they are kept, and where."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from cdc.config.scalars import (
    Flag,
    Integer,
    LocalPath,
    Port,
    Section,
    Size,
    Text,
    resolve,
    wrong,
)
from cdc.config.settings import Positive, PositiveSize

# A batch is one Arrow batch, and the JSON of its rows must fit into columns of 2 GiB.
BatchSize = Annotated[PositiveSize, Field(le=2**30)]

_KEYS_IN_USER = ("s3", "gs", "gcs")
_WILDCARDS = ("0.0.0.0", "::", "*")


def _place(value: object, info: ValidationInfo) -> str:
    """A URL stays as it is; anything else is a directory."""
    if not isinstance(value, str) or "://" not in value:
        return str(resolve(value, info))
    parts = urlsplit(value)
    user, at, _host = parts.netloc.rpartition("@")
    # A user alone is no secret: with some systems it names the container.
    if at and (":" in user or parts.scheme in _KEYS_IN_USER):
        raise wrong(
            "has credentials in it, which would stand in the manifest and in errors; leave them "
            "out: that system takes them from the environment or its profile"
        )
    return value


def _folder(url: str) -> Path | None:
    """The tier's directory, if it is one of this machine."""
    if url.startswith("file:"):
        return Path(os.path.realpath(unquote(urlsplit(url).path)))
    return None if "://" in url else Path(os.path.realpath(url))


class Tier(Section):
    """A second, slower place for older segments."""

    url: Annotated[str, BeforeValidator(_place)] = Field(
        description="Directory, or URL of a file system such as s3://bucket/folder or "
        "gs://bucket/folder, credentials as that system finds them."
    )
    hot_bytes: PositiveSize = Field(
        default=4 * 2**30, description="Sealed segments beyond this size move there, oldest first."
    )


class Flight(Section):
    """The log served over the network, for executors on other machines."""

    enabled: Flag = Field(
        default=False,
        description="Whether the log is served (Arrow Flight). With a cluster as spark.master it "
        "always is.",
    )
    host: Text = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(default=7377, description="Port to listen on.")
    advertise: Text | None = Field(
        default=None,
        description="Name or address by which executors reach it; if not given, host, or this "
        "host's name where host is a wildcard such as 0.0.0.0.",
    )
    certificate: LocalPath | None = Field(
        default=None, description="File of the TLS certificate; without one it is plain text."
    )
    private_key: LocalPath | None = Field(
        default=None, description="File of the certificate's private key."
    )

    ca_file: Text | None = Field(
        default=None,
        description="File, on the executors, of the certificates that they trust; if not given, "
        "the system's.",
    )

    @property
    def advertised(self) -> str:
        """The host that executors connect to."""
        if self.advertise is not None:
            return self.advertise
        return socket.gethostname() if self.host in _WILDCARDS else self.host

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise wrong("certificate and private_key go together; give both or none")
        return self


class Log(Section):
    """The change log on disk."""

    directory: LocalPath = Field(
        default=Path("var/log"), description="Directory that holds the segments."
    )
    durability: Literal["memory", "disk", "fsync"] = Field(
        default="fsync",
        description="When a batch is on disk, and what lets Postgres remove its WAL. fsync: at "
        "once; WAL goes as soon as the log has it on disk. disk: once a second; WAL goes when "
        "every sink has the change. memory: never; the same. With disk and memory one sink that "
        "is paused, slow or down keeps all later WAL on the source.",
    )
    batch_rows: Positive = Field(default=16384, description="Most changes in one batch.")
    batch_bytes: BatchSize = Field(
        default=4 * 2**20, description="Most bytes in one batch; at most 1GiB."
    )
    linger_ms: Annotated[Integer, Field(ge=0, le=60_000)] = Field(
        default=5,
        description="How long a batch waits for more changes while changes keep coming, in "
        "milliseconds. A lone transaction does not wait.",
    )
    segment_bytes: PositiveSize = Field(
        default=64 * 2**20, description="Size at which a segment is sealed."
    )
    segment_rows: Positive = Field(
        default=1_000_000, description="Changes after which a segment is sealed."
    )
    segment_age_s: Positive = Field(
        default=3600, description="Age at which a segment is sealed, in seconds."
    )
    retain_s: Annotated[Integer, Field(ge=0)] = Field(
        default=86_400,
        description="How long delivered changes are kept to be read again, in seconds.",
    )
    retain_bytes: Size = Field(
        default=4 * 2**30, description="Most bytes of delivered changes that are kept."
    )
    max_bytes: PositiveSize = Field(
        default=16 * 2**30,
        description="Most bytes the log takes, the tier included; at least 4 segments.",
    )
    on_full: Literal["pause", "evict"] = Field(
        default="pause",
        description="At max_bytes of undelivered changes: pause reading (the source keeps its "
        "WAL), or evict the oldest and tell the consumers of the gap.",
    )
    tier: Tier | None = Field(
        default=None, description="A second place for older segments; none if not given."
    )
    delivery_records: Size = Field(
        default=64 * 2**20,
        description="Most bytes, for each database, of the records of what was delivered when, "
        "which walbrook trace shows; 0 keeps none.",
    )
    flight: Flight = Field(default_factory=Flight, description="The log served over the network.")

    @model_validator(mode="after")
    def _room_for_segments(self) -> Self:
        if self.max_bytes < 4 * self.segment_bytes:
            raise wrong("max_bytes is less than 4 × segment_bytes; raise it or lower the other")
        return self

    @model_validator(mode="after")
    def _tier_elsewhere(self) -> Self:
        folder = None if self.tier is None else _folder(self.tier.url)
        own = Path(os.path.realpath(self.directory))
        if folder is not None and (folder == own or own in folder.parents):
            raise wrong(
                "lies in log.directory, where the log would remove its own segments; choose a "
                "place outside of it",
                within=("tier", "url"),
            )
        return self
