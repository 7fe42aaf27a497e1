"""Sections that are about Walbrook itself: state, Spark, service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cdc.config.database import PostgresUrl
from cdc.config.scalars import ConfText, Flag, Integer, LocalPath, Section, Size, Text, wrong

Positive = Annotated[Integer, Field(ge=1)]
PositiveSize = Annotated[Size, Field(ge=1)]

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
    micro_batch_target_ms: Annotated[Integer, Field(ge=0, le=600_000)] = Field(
        default=1_000,
        description="How long a micro-batch should take, in milliseconds: if one takes longer, the "
        "next is smaller, within the bounds above; 0 leaves it to the bounds.",
    )
    patience_ms: Annotated[Integer, Field(ge=0, le=600_000)] = Field(
        default=1_000,
        description="How much longer than the others a sink may take with a micro-batch before it "
        "goes on in a lane of its own, in milliseconds.",
    )
    deadline_s: Annotated[Integer, Field(ge=1, le=86_400)] = Field(
        default=60,
        description="After how many seconds a micro-batch that has not ended is reported; after "
        "five times as long it is given up and read again.",
    )
    catch_up_lanes: Annotated[Integer, Field(ge=1, le=64)] = Field(
        default=4,
        description="Most lanes of a database, beside the shared one, in which sinks catch up; "
        "more sinks share them.",
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
