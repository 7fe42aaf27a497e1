"""What the stage of one source needs to know of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from cdc.config import Config, Database, SinkConfig
from cdc.config.hosts import is_cluster
from cdc.connection import Connection
from cdc.decoding.format import Wanted
from cdc.queue.ledger.open import LedgerAddress
from cdc.service.checks.sink import require_fit
from cdc.trace.record_files import RECORDS_BYTES
from cdc.trace.record_log import RecordLog
from spark_pipeline.capacity.backlog import Bounds
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.delivery.value_formats import wanted_by
from spark_pipeline.feed.cluster import cluster_options

_NEAR_ROWS = 100_000


@dataclass(frozen=True)
class StageSettings:
    """The consumers of a source, where its files lie, its bounds; ``term`` is this start."""

    source: str
    term: int
    origin: Origin
    consumers: list[SinkConfig]
    state_dsn: str
    log_directory: Path
    checkpoint_directory: Path
    micro_batch_rows: int
    micro_batch_bytes: int
    micro_batch_target_ms: int = 0  # 0: as much as the bounds allow
    driver_rows: int = 20_000  # rows times consumers that the driver decodes and delivers itself
    patience_s: float = 1.0  # how long the feed waits for its slowest worker while another starves
    deadline_s: float = 60.0  # after which a step that has not ended is a health event
    catch_up_workers: int = 4
    cluster_options: dict[str, str] | None = None  # for the source, if executors are elsewhere
    slots: Slots = field(default_factory=lambda: Slots(16))  # shared with all other sources
    ledger: LedgerAddress | None = None  # of those whose sinks need one
    in_event_time: list[SinkConfig] = field(default_factory=list)  # served in event-time order
    database: Database | None = None  # where the tables of those in event-time order are looked up
    config: Config | None = None  # to check a sink against the tables of its sources
    source_dsn: str = field(default="", repr=False)  # where rows that exist already are read
    publication: str = ""
    wanted_before: Wanted | None = None  # by the consumers of earlier settings of this process

    @property
    def near(self) -> Bounds:
        """How far apart consumers may be that the feed serves together from its start on."""
        return Bounds(min(self.micro_batch_rows, _NEAR_ROWS), self.micro_batch_bytes // 4)

    @property
    def little(self) -> Bounds:
        """How much is decoded in the driver without a Spark job."""
        return Bounds(min(self.micro_batch_rows, self.driver_rows), self.micro_batch_bytes)

    @property
    def much(self) -> Bounds:
        """How much one Spark job decodes at most."""
        return Bounds(self.micro_batch_rows, self.micro_batch_bytes)

    @cached_property
    def wanted(self) -> Wanted:
        """What decode is asked for, so that every consumer finds its own in it."""
        wanted = wanted_by([*self.consumers, *self.in_event_time])
        return wanted if self.wanted_before is None else self.wanted_before.widened(wanted)

    @cached_property
    def records(self) -> RecordLog:
        """Where what its consumers were delivered is recorded."""
        most = RECORDS_BYTES if self.config is None else self.config.log.delivery_records
        return RecordLog(self.source, self.log_directory, most)

    def require_fit(self, sink: SinkConfig, state: Connection) -> None:
        """OperatorError for a sink that cannot be served as it is configured."""
        if self.config is not None:
            require_fit(self.config, sink, state)

    @classmethod
    def of(
        cls, config: Config, database: Database, term: int, slots: Slots | None = None
    ) -> StageSettings:
        parameters = conninfo_to_dict(database.dsn())
        spark = config.spark
        active = [s for s in config.sinks_of(database.name) if s.status == "active"]
        return cls(
            config=config,
            source=database.name,
            term=term,
            origin=Origin(
                database.name, str(parameters.get("host", "")), str(parameters.get("dbname", ""))
            ),
            consumers=[s for s in active if not s.in_time_order],
            in_event_time=[s for s in active if s.in_time_order],
            database=database,
            state_dsn=config.state_dsn(),
            log_directory=config.log.directory / database.name,
            checkpoint_directory=spark.checkpoint_directory / database.name,
            micro_batch_rows=spark.micro_batch_rows,
            micro_batch_bytes=spark.micro_batch_bytes,
            micro_batch_target_ms=spark.micro_batch_target_ms,
            patience_s=spark.patience_ms / 1000,
            deadline_s=spark.deadline_s,
            driver_rows=spark.driver_rows,
            catch_up_workers=spark.catch_up_workers,
            cluster_options=(
                cluster_options(config, database) if is_cluster(spark.master) else None
            ),
            slots=slots or Slots(spark.delivery_slots),
            ledger=LedgerAddress.of(config),
            source_dsn=database.dsn(),
            publication=database.publication.name,
        )
