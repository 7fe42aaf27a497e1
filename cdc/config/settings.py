"""Sections that are about Walbrook itself: state, Spark, service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from cdc.config.hosts import is_loopback, is_master
from cdc.config.postgres import PostgresUrl
from cdc.config.scalars import (
    ConfText,
    Flag,
    Integer,
    LocalPath,
    Name,
    Section,
    Size,
    Text,
    wrong,
)
from cdc.config.secrets import SecretText

Positive = Annotated[Integer, Field(ge=1)]
PositiveSize = Annotated[Size, Field(ge=1)]

Memory = Annotated[str, Field(pattern=r"^[0-9]+[kmgtKMGT][bB]?$")]
SparkLevel = Literal["OFF", "ERROR", "WARN", "INFO", "DEBUG"]

# Spark settings that have a key of their own: two places for one setting would contradict.
_OWN_KEYS = {
    "spark.master": "master",
    "spark.app.name": "app_name",
    "spark.driver.memory": "driver_memory",
    "spark.driver.host": "driver_host",
    "spark.driver.extraJavaOptions": "driver_java_options",
    "spark.executor.memory": "executor_memory",
    "spark.executor.cores": "executor_cores",
    "spark.executor.instances": "executor_instances",
    "spark.executor.extraJavaOptions": "executor_java_options",
    "spark.cores.max": "max_cores",
    "spark.pyspark.python": "executor_python",
    "spark.ui.enabled": "ui",
    "spark.ui.port": "ui_port",
    "spark.log.level": "log_level",
}


def _java_options(value: object) -> str:
    if not isinstance(value, str):
        raise wrong("should be text")
    if "-Xmx" in value:
        raise wrong("holds -Xmx, which Spark takes from driver_memory and executor_memory alone")
    return value


JavaOptions = Annotated[str, BeforeValidator(_java_options)]


class State(Section):
    """Where cursors and queues are kept."""

    url: PostgresUrl | None = Field(
        default=None, description="URL of the state database; if not given, the first database."
    )


class Spark(Section):
    """The Spark session."""

    master: Text = Field(
        default="local[*]",
        description="Spark master to run on: local[N] for this machine, or a cluster: "
        "spark://host:port, yarn, k8s://https://host:port.",
    )
    app_name: Text = Field(default="walbrook", description="Name of the application in Spark.")
    driver_memory: Memory = Field(
        default="1g", description="Memory of the driver's JVM, as Spark writes it."
    )
    driver_host: Text | None = Field(
        default=None,
        description="Name or address by which executors of a cluster reach the driver; if not "
        "given, this host's own.",
    )
    driver_java_options: JavaOptions = Field(
        default="", description="Further options of the driver's JVM, behind ours."
    )
    executor_memory: Memory = Field(
        default="1g", description="Memory of each executor's JVM on a cluster, as Spark writes it."
    )
    executor_cores: Positive | None = Field(
        default=None,
        description="Cores of each executor; if not given, the cluster's own default.",
    )
    executor_instances: Positive | None = Field(
        default=None,
        description="How many executors (YARN, Kubernetes); if not given, the cluster's own "
        "default.",
    )
    max_cores: Positive | None = Field(
        default=None,
        description="Most cores of all executors together (a standalone cluster); if not given, "
        "as many as there are.",
    )
    executor_java_options: JavaOptions = Field(
        default="", description="Options of the executors' JVMs."
    )
    executor_python: Text | None = Field(
        default=None,
        description="Python of the executors, with Walbrook installed; must be there on this host "
        "too. If not given, the one that runs the service.",
    )
    ui: Flag = Field(default=False, description="Whether Spark's own web page is served.")
    ui_host: Text = Field(
        default="127.0.0.1", description="Address that Spark's web page listens on."
    )
    ui_port: Annotated[Integer, Field(ge=0, le=65535)] = Field(
        default=4040, description="Port of Spark's web page; 0 takes a free one."
    )
    log_level: SparkLevel = Field(default="ERROR", description="How much Spark logs.")
    log_levels: dict[Name, SparkLevel] = Field(
        default_factory=dict,
        description="The same for single loggers, by their Java names, in the driver.",
    )
    micro_batch_rows: Positive = Field(
        default=200_000, description="Most changes in one micro-batch."
    )
    micro_batch_bytes: PositiveSize = Field(
        default=128 * 2**20, description="Most bytes in one micro-batch."
    )
    micro_batch_target_ms: Annotated[Integer, Field(ge=0, le=600_000)] = Field(
        default=5_000,
        description="How long a micro-batch should take, in milliseconds: if one takes longer, the "
        "next is smaller, within the bounds above; 0 leaves it to the bounds.",
    )
    driver_rows: Annotated[Integer, Field(ge=0, le=1_000_000)] = Field(
        default=20_000,
        description="Up to how many rows, times the sinks that take them, the driver decodes and "
        "delivers itself; larger ranges go to the executors.",
    )
    patience_ms: Annotated[Integer, Field(ge=0, le=600_000)] = Field(
        default=1_000,
        description="How long new changes wait for the slowest sink while another sink has nothing "
        "to do, in milliseconds; after that the slow sink reads the change log by itself.",
    )
    deadline_s: Annotated[Integer, Field(ge=1, le=86_400)] = Field(
        default=60,
        description="After how many seconds a decode or a delivery that has not ended is "
        "reported; a Spark job is cancelled after five times as long.",
    )
    catch_up_workers: Annotated[Integer, Field(ge=1, le=64)] = Field(
        default=4,
        description="Most sinks of a database that read the change log by themselves at once; if "
        "more are behind, they take turns.",
    )
    delivery_slots: Annotated[Integer, Field(ge=1, le=256)] = Field(
        default=16,
        description="Most deliveries under way at once, of all databases together; if more wait, "
        "they take turns by the priority of their sinks.",
    )
    checkpoint_directory: LocalPath = Field(
        default=Path("var/spark"), description="Directory for Spark's checkpoint, which is scratch."
    )
    conf: dict[str, ConfText] = Field(
        default_factory=dict, description="Further Spark settings, by their Spark names."
    )

    @model_validator(mode="after")
    def _known_master(self) -> Self:
        if not is_master(self.master):
            raise wrong(
                "should be local, local[N], spark://host:port, yarn or k8s://https://host:port",
                within=("master",),
            )
        return self

    @model_validator(mode="after")
    def _one_place_a_setting(self) -> Self:
        for name in self.conf:
            if name in _OWN_KEYS:
                raise wrong(f"conf holds {name}; set spark.{_OWN_KEYS[name]} in its place")
        return self


class ApiToken(Section):
    """A bearer token that lets its owner use the HTTP API."""

    name: Name = Field(description="What it is called in errors and logs.")
    token: SecretText = Field(description="The token itself, at least 16 characters.")
    consumers: tuple[Name, ...] | None = Field(
        default=None,
        min_length=1,
        description="The sinks it may be used for; if not given, all of them, and all that "
        "operators do.",
    )
    role: Literal["read", "operate", "admin"] = Field(
        default="admin",
        description="What it may do where it has no consumers: read positions, health and lists; "
        "operate (pause, rewind, redeliver, backfill and so on, and read dead letters); admin "
        "(also repair, forget, accept gaps and read the audit).",
    )

    @model_validator(mode="after")
    def _has_one_purpose(self) -> Self:
        self.refuse_together("role", ("consumers",))
        return self

    @model_validator(mode="after")
    def _is_hard_to_guess(self) -> Self:
        if not re.fullmatch(r"[\x21-\x7e]{16,1024}", self.token.get_secret_value()):
            raise wrong(
                "should be 16 to 1024 letters, digits and signs without spaces; openssl rand -hex "
                "32 makes one",
                within=("token",),
            )
        return self


class Http(Section):
    """The HTTP interface."""

    enabled: Flag = Field(default=True, description="Whether HTTP is served.")
    host: Text = Field(default="127.0.0.1", description="Address to listen on.")
    port: Annotated[Integer, Field(ge=0, le=65535)] = Field(
        default=7376, description="Port to listen on; 0 takes a free one."
    )
    tokens: tuple[ApiToken, ...] = Field(
        default=(),
        description="Bearer tokens for /api. Without any, /api is served to this machine alone, "
        "and only if host is one of its loopback addresses.",
    )
    requests_per_second: Annotated[Integer, Field(ge=1, le=100_000)] = Field(
        default=50,
        description="Requests of operators per second and token, with twice as many at once; more "
        "are answered with 429. Receiving and acknowledging of pull consumers is not limited.",
    )

    @model_validator(mode="after")
    def _each_token_once(self) -> Self:
        names = [token.name for token in self.tokens]
        secrets = [token.token.get_secret_value() for token in self.tokens]
        for i, token in enumerate(self.tokens):
            for key, known in (("name", names), ("token", secrets)):
                value = token.name if key == "name" else token.token.get_secret_value()
                if value in known[:i]:
                    raise wrong("is there twice; choose another", within=("tokens", i, key))
        return self

    @property
    def serves_api(self) -> bool:
        """Whether /api answers at all: never without tokens to strangers."""
        return bool(self.tokens) or is_loopback(self.host)


class Health(Section):
    """From where on walbrook.health warns."""

    long_transaction_s: Annotated[Integer, Field(ge=0, le=604_800)] = Field(
        default=900,
        description="Age of a transaction of the source that pins the slot, in seconds; 0 warns "
        "of none.",
    )
    min_memory: Size = Field(
        default=256 * 2**20, description="Memory that should be available to the service."
    )
    min_disk: Size = Field(
        default=2**30, description="Bytes that should be free on the disk of log.directory."
    )


class Service(Section):
    """The running process."""

    http: Http = Field(default_factory=Http, description="The HTTP interface.")
    health: Health = Field(
        default_factory=Health, description="From where on walbrook.health warns."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="How much the service logs."
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="Lines for people or for machines."
    )
    drain_timeout_s: Annotated[Integer, Field(ge=0, le=3600)] = Field(
        default=30, description="How long a stop waits for deliveries in flight, in seconds."
    )
