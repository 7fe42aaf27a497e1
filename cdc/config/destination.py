"""Where a sink delivers to: one class per destination, distinguished by ``type``."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict
from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from cdc.config.destination_section import DestinationSection
from cdc.config.kafka import KafkaSasl, KafkaServer, KafkaTls, KafkaTopics, TopicName, TopicTemplate
from cdc.config.lakehouse import DeltaDestination, IcebergDestination
from cdc.config.parquet import ParquetDestination
from cdc.config.postgres import PostgresServer
from cdc.config.scalars import Flag, Integer, LocalPath, Port, Section, Size, Text, wrong
from cdc.config.secrets import SecretText
from cdc.config.table_template import TableTemplate, refusal_of_template

TimeoutMs = Annotated[Integer, Field(ge=1, le=600_000)]
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _has_host(url: str, schemes: tuple[str, ...]) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _redis_url(url: SecretText) -> SecretText:
    if not _has_host(url.get_secret_value(), ("redis", "rediss")):
        raise wrong("should be a URL such as rediss://user:password@host:6379/0")
    return url


RedisUrl = Annotated[SecretText, AfterValidator(_redis_url)]


def _webhook_url(url: str) -> str:
    if not _has_host(url, ("http", "https")) or re.search(r"[\x00-\x20\x7f]", url):
        raise wrong("should be a URL such as https://example.com/changes")
    if "@" in urlsplit(url).netloc:
        raise wrong("should hold no user or password; send them in headers, as Authorization")
    return url


def _headers(headers: dict[str, SecretText]) -> dict[str, SecretText]:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise wrong("has a name that is not allowed in HTTP; use letters, digits and -")
        if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value.get_secret_value()):
            raise wrong(f"has a line break or control character in {name}; take it out")
    return headers


class FileDestination(DestinationSection):
    """Files of JSON lines."""

    rewind_ways: ClassVar[tuple[str, ...]] = ("new_generation", "truncate")

    type: Literal["file"] = Field(default="file", description="Always file.")
    path: LocalPath = Field(description="Directory that the files are written to.")
    rotate_bytes: Annotated[Size, Field(ge=1)] = Field(
        default=64 * 2**20, description="Size at which a file is closed and the next begun."
    )

    @property
    def default_batch_size(self) -> int:
        return 10_000

    def place(self, _consumer: str) -> tuple[object, ...] | None:
        return ("directory", self.path)


class PostgresDestination(PostgresServer, DestinationSection):
    """Tables of a Postgres database."""

    message_bytes_max: ClassVar[int | None] = 256 * 2**20

    writes_columns: ClassVar[bool] = True
    type: Literal["postgres"] = Field(default="postgres", description="Always postgres.")
    mode: Literal["mirror", "append", "events"] = Field(
        default="mirror",
        description="mirror: tables that equal those of the source. append: every change as a row "
        "of its table's history. events: every change as a row with JSON, in one table that is "
        "partitioned by time.",
    )
    table: TableTemplate | None = Field(
        default=None,
        description="Name of the target table, where {schema} and {table} stand for those of the "
        "source. If not given, {schema}.{table}, and public.walbrook_events in mode events.",
    )
    target_schema: Text | None = Field(
        default=None,
        max_length=63,
        description="Schema of all target tables, in place of the one that table or routing says.",
    )
    own_schema: Annotated[Text, Field(max_length=63)] = Field(
        default="walbrook_sink",
        description="Schema in the destination for the positions of sinks; created if missing.",
    )
    on_rewind: Literal["generation", "replace"] = Field(
        default="generation",
        description="What happens to rows of append and events that come again after a rewind. "
        "generation: they are added under the next number in the column walbrook_generation. "
        "replace: the rows from there on are deleted first, but those that a backfill read.",
    )
    partition_by: Literal["day", "month"] = Field(
        default="day", description="Span of one partition of the table of mode events."
    )
    retention_days: Annotated[Integer, Field(ge=1, le=36_500)] | None = Field(
        default=None,
        description="Partitions of mode events that are older than this are dropped; if not "
        "given, none is.",
    )
    disable_triggers: Flag = Field(
        default=False,
        description="Write with session_replication_role = replica: no triggers fire, and foreign "
        "keys are not checked. Needs the privilege to set it.",
    )
    connect_timeout_ms: TimeoutMs = Field(
        default=10_000, description="How long a connect may take, in milliseconds."
    )
    statement_timeout_ms: Annotated[Integer, Field(ge=1_000, le=3_600_000)] = Field(
        default=60_000,
        description="How long a statement may take, its wait for a lock included, in milliseconds.",
    )

    @model_validator(mode="after")
    def _fits_the_mode(self) -> Self:
        if self.mode == "events" and "{" in (self.table or ""):
            raise wrong(
                "is one table for all with mode: events; name it without {}", within=("table",)
            )
        given = self.model_fields_set
        for key in ("partition_by", "retention_days"):
            if key in given and self.mode != "events":
                raise wrong("has a meaning with mode: events alone; leave it out", within=(key,))
        if "on_rewind" in given and self.mode == "mirror":
            raise wrong(
                "has no use with mode: mirror, which is repeated by key; leave it out",
                within=("on_rewind",),
            )
        return self

    @property
    def delivery_rows(self) -> int:
        return 50_000

    @property
    def takes_texts(self) -> bool:
        return self.holds_tables

    @property
    def holds_tables(self) -> bool:
        return self.mode != "events"

    @property
    def reload_refusal(self) -> str | None:
        if self.mode == "events":
            return "in mode events all tables share one"
        return None if self.table is None else refusal_of_template(self.table)

    @property
    def default_batch_size(self) -> int:
        return 10_000

    def place(self, consumer: str) -> tuple[object, ...] | None:
        """Its rows know whose they are, so that several sinks may share a database."""
        where = conninfo_to_dict(self.dsn())
        named = [where.get(part, "") for part in ("host", "port", "dbname")]
        return ("postgres", *named, self.own_schema, consumer)


class Tls(Section):
    """How TLS is verified."""

    verify: Flag = Field(default=True, description="Verify the server's certificate and name.")
    ca_file: LocalPath | None = Field(
        default=None, description="File of trusted certificates; if not given, the system's."
    )

    @model_validator(mode="after")
    def _trust_is_used(self) -> Self:
        if self.ca_file is not None and not self.verify:
            raise wrong("ca_file has no use with verify: false; take one of them out")
        return self


def _tls_form(value: object) -> str:
    return "settings" if isinstance(value, dict | Tls | KafkaTls) else "flag"


class RedisStreamDestination(DestinationSection):
    """A Redis stream."""

    rewind_ways: ClassVar[tuple[str, ...]] = ("new_generation", "truncate")
    takes_references: ClassVar[bool] = True

    type: Literal["redis_stream"] = Field(
        default="redis_stream", description="Always redis_stream."
    )
    url: RedisUrl | None = Field(
        default=None, description="Connection URL, in place of the five keys that follow."
    )
    host: Text | None = Field(
        default=None, description="Host of the Redis server; required without url."
    )
    port: Port = Field(default=6379, description="Port of the Redis server.")
    database: Annotated[Integer, Field(ge=0)] = Field(
        default=0, description="Number of the Redis database."
    )
    username: Text | None = Field(default=None, description="User to authenticate as.")
    password: SecretText | None = Field(default=None, description="Password to authenticate with.")
    tls: Annotated[
        Annotated[Flag, Tag("flag")] | Annotated[Tls, Tag("settings")], Discriminator(_tls_form)
    ] = Field(default=False, description="Connect with TLS: true, false, or how to verify it.")
    stream_key: Text | None = Field(
        default=None,
        max_length=255,
        description="Key of the stream; if not given, walbrook. and the sink's name.",
    )
    timeout_ms: TimeoutMs = Field(
        default=5000, description="How long a connect or an answer may take, in milliseconds."
    )
    max_length: Annotated[Integer, Field(ge=1)] | None = Field(
        default=None,
        description="About how many entries a stream keeps; the oldest are removed. If not given, "
        "all.",
    )
    max_age_s: Annotated[Integer, Field(ge=1)] | None = Field(
        default=None,
        description="How long after its commit an entry is kept, in seconds; a stream is trimmed "
        "when something is added to it. Only with ordering: commit. If not given, without a limit.",
    )
    trim_exactly: Flag = Field(
        default=False,
        description="Keep no entry more than max_length and max_age_s say; costs the server more.",
    )

    @model_validator(mode="after")
    def _trims_something(self) -> Self:
        if self.trim_exactly and self.max_length is None and self.max_age_s is None:
            raise wrong(
                "has no use without max_length or max_age_s; give one of them, or leave it out",
                within=("trim_exactly",),
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_connect(self) -> Self:
        self.refuse_together("url", ("host", "port", "database", "username", "password"))
        if self.url is None and self.host is None:
            raise wrong("needs url or host; give one of them")
        if self.url and self.tls and self.url.get_secret_value().startswith("redis:"):
            raise wrong("tls is asked for, but url begins with redis://; write rediss://")
        return self

    @property
    def default_batch_size(self) -> int:
        return 1000

    def place(self, consumer: str) -> tuple[object, ...] | None:
        host, port, database = self.host, self.port, str(self.database)
        if self.url is not None:
            url = urlsplit(self.url.get_secret_value())
            host, port, database = url.hostname, url.port or 6379, url.path.strip("/") or "0"
        return ("redis", host, port, database, self.stream_key or f"walbrook.{consumer}")


class KafkaDestination(DestinationSection):
    """Topics of a Kafka cluster, or of a server that speaks its protocol."""

    rewind_ways: ClassVar[tuple[str, ...]] = ("new_generation",)
    type: Literal["kafka"] = Field(default="kafka", description="Always kafka.")
    bootstrap_servers: tuple[KafkaServer, ...] = Field(
        min_length=1, description="Servers that are asked first, each as host:port."
    )
    topic: TopicTemplate = Field(
        default="walbrook.{schema}.{table}",
        description="Topic of a message that no routing places; {schema}, {table} and {sink} "
        "stand for names, in which other characters than letters, digits, ., _ and - become _.",
    )
    topic_without_table: TopicTemplate = Field(
        default="walbrook.{sink}",
        description="Topic of a message that belongs to no table, such as a logical message or a "
        "gap.",
    )
    exactly_once: Flag = Field(
        default=False,
        description="Deliver in transactions that hold the sink's cursor, so that readers with "
        "isolation.level read_committed see each message once; false: at least once, at the "
        "lowest latency.",
    )
    cursor_topic: TopicName | None = Field(
        default=None,
        description="Topic of the cursor with exactly_once, and the transactional id; if not "
        "given, walbrook.cursor., the database's name, . and the sink's name.",
    )
    tombstones: Flag = Field(
        default=False,
        description="Follow each delete with a record without a value, so that a compacted topic "
        "forgets the key; a key that an update leaves gets one, too.",
    )
    schemas: Flag = Field(
        default=False,
        description="Put Kafka Connect's schema beside the payload of keys and values, for "
        "converters with schemas.enable=true; only with shape: debezium.",
    )
    compression: Literal["none", "lz4", "zstd", "snappy", "gzip"] = Field(
        default="lz4", description="Compression of the messages."
    )
    create_topics: KafkaTopics | None = Field(
        default=None,
        description="Create topics that do not exist, as said here; if not given, the broker "
        "decides whether it does so itself.",
    )
    tls: Annotated[
        Annotated[Flag, Tag("flag")] | Annotated[KafkaTls, Tag("settings")],
        Discriminator(_tls_form),
    ] = Field(default=False, description="Connect with TLS: true, false, or how to verify it.")
    sasl: KafkaSasl | None = Field(default=None, description="Authentication by SASL.")
    timeout_ms: Annotated[Integer, Field(ge=1000, le=600_000)] = Field(
        default=10_000, description="How long a delivery may take, in milliseconds."
    )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.cursor_topic is not None and not self.exactly_once:
            raise wrong("cursor_topic has no use without exactly_once: true; take it out")
        return self

    @property
    def default_batch_size(self) -> int:
        return 10_000

    def place(self, consumer: str) -> tuple[object, ...] | None:
        if not self.exactly_once:
            return None
        servers = ",".join(sorted(self.bootstrap_servers))
        return ("kafka", servers, self.cursor_topic or f"walbrook.cursor.{consumer}")


class WebhookDestination(DestinationSection):
    """An HTTP endpoint."""

    defers: ClassVar[bool] = True
    takes_references: ClassVar[bool] = True
    default_partition_count: ClassVar[int] = 8

    type: Literal["webhook"] = Field(default="webhook", description="Always webhook.")
    url: Annotated[str, AfterValidator(_webhook_url)] = Field(
        repr=False, description="Where requests go, http or https; secrets belong in headers."
    )
    headers: Annotated[dict[str, SecretText], AfterValidator(_headers)] = Field(
        default_factory=dict, description="Headers of every request; their values are secrets."
    )
    method: Literal["POST", "PUT"] = Field(default="POST", description="HTTP method.")
    batch: Flag = Field(
        default=True, description="Send many messages a request, as data; else one a request."
    )
    timeout_ms: TimeoutMs = Field(
        default=5000, description="How long a request may take, in milliseconds."
    )
    max_retries: Annotated[Integer, Field(ge=0, le=100)] = Field(
        default=3,
        description="How often a failed request is tried again at once; if no server answers it is "
        "tried again later.",
    )
    verify: Flag = Field(default=True, description="Verify the server's certificate and name.")
    ledger: Flag = Field(
        default=True,
        description="Remember what was accepted, so that a crash repeats only the last few "
        "requests.",
    )

    @property
    def default_batch_size(self) -> int:
        return 100 if self.batch else 1

    def place(self, _consumer: str) -> tuple[object, ...] | None:
        return None


class PullDestination(DestinationSection):
    """A queue in the state database, for consumers that fetch over SQL or HTTP."""

    type: Annotated[Literal["pull", "sequin_stream"], AfterValidator(lambda _: "pull")] = Field(
        default="pull", description="pull; sequin_stream is another name for it."
    )
    visibility_s: Annotated[Integer, Field(ge=1, le=43_200)] = Field(
        default=30,
        description="How long a message that was handed out is kept from others, in seconds, where "
        "the claimer does not say.",
    )
    max_in_flight: Annotated[Integer, Field(ge=1, le=1_000_000)] = Field(
        default=10_000, description="Most messages handed out and not yet acknowledged."
    )
    max_messages: Annotated[Integer, Field(ge=1)] | None = Field(
        default=None,
        description="Most messages that the queue keeps; beyond it the oldest are dropped, and a "
        "gap is recorded. If not given, no limit.",
    )
    max_bytes: Annotated[Size, Field(ge=1)] | None = Field(
        default=None, description="The same for the size of all its messages together."
    )
    ttl_s: Annotated[Integer, Field(ge=1)] | None = Field(
        default=None,
        description="After how many seconds in the queue a message is dropped, with a gap in its "
        "place. If not given, never.",
    )
    max_waiting: Annotated[Integer, Field(ge=1, le=10_000)] = Field(
        default=100, description="Most requests over HTTP that wait for messages at once."
    )

    @property
    def default_batch_size(self) -> int:
        return 10_000

    def place(self, _consumer: str) -> tuple[object, ...] | None:
        return None


Destination = Annotated[
    DeltaDestination
    | FileDestination
    | IcebergDestination
    | KafkaDestination
    | ParquetDestination
    | PostgresDestination
    | PullDestination
    | RedisStreamDestination
    | WebhookDestination,
    Field(discriminator="type"),
]
