"""Sections that are about Walbrook itself: state, log, Spark, service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cdc.config.database import PostgresUrl
from cdc.config.scalars import ConfText, Flag, Integer, LocalPath, Section, Size, Text, wrong

Positive = Annotated[Integer, Field(ge=1)]
PositiveSize = Annotated[Size, Field(ge=1)]
# A batch is one Arrow batch, and the JSON of its rows must fit into columns of 2 GiB.
BatchSize = Annotated[PositiveSize, Field(le=2**30)]

# Spark settings that have a key of their own: two places for one setting would contradict.
_OWN_KEYS = {
    "spark.master": "master",
    "spark.app.name": "app_name",
    "spark.driver.memory": "driver_memory",
    "spark.ui.enabled": "ui",
}


class State(Section):
    """Where cursors and queues are kept."""

    url: PostgresUrl | None = Field(
        default=None, description="URL of the state database; if not given, the first database."
    )


class Log(Section):
    """The change log on disk."""

    directory: LocalPath = Field(
        default=Path("var/log"), description="Directory that holds the segments."
    )
    durability: Literal["disk", "fsync"] = Field(
        default="disk",
        description="Whether writes are synced in the background or before they are confirmed.",
    )
    batch_rows: Positive = Field(default=16384, description="Most changes in one batch.")
    batch_bytes: BatchSize = Field(
        default=4 * 2**20, description="Most bytes in one batch; at most 1GiB."
    )
    linger_ms: Annotated[Integer, Field(ge=0, le=60_000)] = Field(
        default=10, description="How long a batch waits for more changes, in milliseconds."
    )
    segment_bytes: PositiveSize = Field(
        default=64 * 2**20, description="Size at which a segment is sealed."
    )
    max_bytes: PositiveSize = Field(
        default=16 * 2**30, description="Most bytes the log takes; at least 4 segments."
    )

    @model_validator(mode="after")
    def _room_for_segments(self) -> Self:
        if self.max_bytes < 4 * self.segment_bytes:
            raise wrong("max_bytes is less than 4 × segment_bytes; raise it or lower the other")
        return self


class Spark(Section):
    """The Spark session."""

    master: Text = Field(default="local[*]", description="Spark master to run on.")
    app_name: Text = Field(default="walbrook", description="Name of the application in Spark.")
    driver_memory: Annotated[str, Field(pattern=r"^[0-9]+[kmgtKMGT][bB]?$")] = Field(
        default="1g", description="Memory of the driver, as Spark writes it."
    )
    ui: Flag = Field(default=False, description="Whether Spark's own web page is served.")
    log_level: Literal["OFF", "ERROR", "WARN", "INFO", "DEBUG"] = Field(
        default="ERROR", description="How much Spark logs."
    )
    micro_batch_rows: Positive = Field(
        default=200_000, description="Most changes in one micro-batch."
    )
    micro_batch_bytes: PositiveSize = Field(
        default=128 * 2**20, description="Most bytes in one micro-batch."
    )
    checkpoint_directory: LocalPath = Field(
        default=Path("var/spark"), description="Directory for Spark's checkpoint, which is scratch."
    )
    conf: dict[str, ConfText] = Field(
        default_factory=dict, description="Further Spark settings, by their Spark names."
    )

    @model_validator(mode="after")
    def _one_place_a_setting(self) -> Self:
        for name in self.conf:
            if name in _OWN_KEYS:
                raise wrong(f"conf holds {name}; set spark.{_OWN_KEYS[name]} in its place")
        return self


class Http(Section):
    """The HTTP interface."""

    enabled: Flag = Field(default=True, description="Whether HTTP is served.")
    host: Text = Field(default="127.0.0.1", description="Address to listen on.")
    port: Annotated[Integer, Field(ge=0, le=65535)] = Field(
        default=7376, description="Port to listen on; 0 takes a free one."
    )


class Service(Section):
    """The running process."""

    http: Http = Field(default_factory=Http, description="The HTTP interface.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="How much the service logs."
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="Lines for people or for machines."
    )
    drain_timeout_s: Annotated[Integer, Field(ge=0, le=3600)] = Field(
        default=30, description="How long a stop waits for deliveries in flight, in seconds."
    )
