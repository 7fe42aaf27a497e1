"""Destinations: one module each, all behind the one seam in ``base``.

``open_sink`` is the only way in; a new destination is added to ``_open`` below. A sink takes plain
values, so that it can be used and tested without a configuration file. The folder may import
``cdc`` and nothing else of the project.

``batch_size`` bounds a request to a server. The sinks on disk commit once for each batch they are
handed, cut only by bytes, because there a request is a sync of the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cdc.config.destination import (
    Destination,
    FileDestination,
    KafkaDestination,
    PostgresDestination,
    PullDestination,
    RedisStreamDestination,
    Tls,
    WebhookDestination,
)
from cdc.config.lakehouse import DeltaDestination, IcebergDestination, LakehouseMaintenance
from cdc.config.parquet import ParquetDestination
from cdc.errors import ProtocolError
from cdc.generation import FIRST, Generation
from cdc.queue.groups import BY_KEY, Grouping
from sinks.base import Delivery, FollowsRewinds, Sink
from sinks.claim_check import ClaimCheckedSink
from sinks.claim_stores import ClaimPlace
from sinks.file import FileSink
from sinks.parquet import ParquetSink
from sinks.postgres import PostgresSink
from sinks.pull import PullSink, Queue
from sinks.redis_stream import RedisStreamSink
from sinks.webhook import WebhookSink

if TYPE_CHECKING:
    from sinks.lakehouse import MaintenancePlan

__all__ = ["ClaimPlace", "Delivery", "FollowsRewinds", "Queue", "Sink", "open_sink"]


def open_sink(
    destination: Destination,
    *,
    consumer: str,
    batch_size: int,
    source: str = "",
    grouping: Grouping = BY_KEY,
    queue: Queue | None = None,
    generation: Generation = FIRST,
    claims: ClaimPlace | None = None,
    state_dsn: str = "",
) -> Sink:
    """The sink for a destination; it connects when it is first handed a batch.

    ``source`` is the database whose changes it is handed. ``queue`` says where one of type pull
    stores its messages. ``generation`` is for sinks that keep a position at their destination, and
    decides where that is. ``claims`` says where the content of oversize messages goes; without it
    they reach the sink as they are. ``state_dsn`` is the state database, where a catalog of tables
    lies that has no other place.
    """
    sink = _open(destination, consumer, batch_size, source, grouping, queue, generation, state_dsn)
    return sink if claims is None else ClaimCheckedSink(sink, claims, consumer=consumer)


def _open(
    destination: Destination,
    consumer: str,
    batch_size: int,
    source: str,
    grouping: Grouping,
    queue: Queue | None,
    generation: Generation,
    state_dsn: str,
) -> Sink:
    match destination:
        case DeltaDestination():
            return _delta(destination, consumer, source, generation)
        case FileDestination():
            return FileSink(
                destination.path,
                consumer=consumer,
                rotate_bytes=destination.rotate_bytes,
                generation=generation,
            )
        case IcebergDestination():
            return _iceberg(destination, consumer, source, generation, state_dsn)
        case KafkaDestination():
            return _kafka(destination, consumer, batch_size, source, grouping, generation)
        case ParquetDestination():
            return _parquet(destination, consumer, source, generation)
        case PostgresDestination():
            return _postgres(destination, source, consumer)
        case PullDestination():
            if queue is None:
                raise ProtocolError(f"consumer {consumer} is pulled from, but has no queue")
            return PullSink(queue, consumer=consumer)
        case RedisStreamDestination():
            return _redis_stream(destination, consumer, batch_size, generation)
        case WebhookDestination():
            return WebhookSink(
                destination.url,
                consumer=consumer,
                batch_size=batch_size,
                headers={k: v.get_secret_value() for k, v in destination.headers.items()},
                method=destination.method,
                batch=destination.batch,
                timeout_s=destination.timeout_ms / 1000,
                max_retries=destination.max_retries,
                verify=destination.verify,
            )


def _delta(
    destination: DeltaDestination, consumer: str, source: str, generation: Generation
) -> Sink:
    # Its library is an extra, and loading it takes time.
    from sinks.lakehouse import LakehouseSink, LakeNames
    from sinks.lakehouse.delta import delta_tables

    root = generation.named(destination.root)
    return LakehouseSink(
        delta_tables(root, f"{source}/{consumer}", destination.options()),
        LakeNames(destination.table),
        mode=destination.mode,
        partition_by=("walbrook_date",) if destination.partition_by == "date" else (),
        maintenance=_maintenance(destination.maintenance),
    )


def _iceberg(
    destination: IcebergDestination,
    consumer: str,
    source: str,
    generation: Generation,
    state_dsn: str,
) -> Sink:
    from sinks.lakehouse import LakehouseSink, LakeNames
    from sinks.lakehouse.iceberg import Catalogs, MergesOnRead, iceberg_tables

    root, catalog = generation.named(destination.root), destination.catalog
    options, named = destination.options(), catalog.name or consumer
    catalogs = Catalogs(named, catalog.properties(), root, options, state_dsn=state_dsn)
    return LakehouseSink(
        iceberg_tables(catalogs.open, root, f"{source}/{consumer}", generation.number),
        LakeNames(destination.table),
        mode=destination.mode,
        partition_by=("walbrook_date",) if destination.partition_by == "date" else (),
        merges=MergesOnRead() if destination.merge == "on_read" else None,
        maintenance=_maintenance(destination.maintenance),
    )


def _parquet(
    destination: ParquetDestination, consumer: str, source: str, generation: Generation
) -> Sink:
    if destination.columns == "json":
        return ParquetSink(
            Path(destination.root),
            consumer=consumer,
            partition_by=destination.partition_by,
            compression=destination.compression,
            generation=generation,
        )
    from sinks.lakehouse import LakeNames
    from sinks.lakehouse.parquet import TypedParquetSink, parquet_tables

    return TypedParquetSink(
        parquet_tables(
            generation.named(destination.root),
            f"{source}/{consumer}",
            destination.options(),
            compression=destination.compression,
            generation=generation,
        ),
        LakeNames(destination.table),
        partition_by=[f"walbrook_{level}" for level in destination.levels],
        maintenance=_maintenance(destination.maintenance),
    )


def _maintenance(upkeep: LakehouseMaintenance) -> MaintenancePlan | None:
    from sinks.lakehouse import MaintenancePlan

    if not upkeep.enabled:
        return None
    return MaintenancePlan(upkeep.interval_s, upkeep.target_file_bytes, upkeep.retain_hours)


def _postgres(destination: PostgresDestination, source: str, consumer: str) -> PostgresSink:
    return PostgresSink(
        destination.dsn(),
        source=source,
        consumer=consumer,
        mode=destination.mode,
        table=destination.table,
        target_schema=destination.target_schema,
        own_schema=destination.own_schema,
        on_rewind=destination.on_rewind,
        partition_by=destination.partition_by,
        retention_days=destination.retention_days,
        disable_triggers=destination.disable_triggers,
        connect_timeout_s=destination.connect_timeout_ms / 1000,
        statement_timeout_s=destination.statement_timeout_ms / 1000,
    )


def _redis_stream(
    destination: RedisStreamDestination, consumer: str, batch_size: int, generation: Generation
) -> RedisStreamSink:
    url, password, tls = destination.url, destination.password, destination.tls
    checks = tls if isinstance(tls, Tls) else Tls()
    return RedisStreamSink(
        consumer=consumer,
        stream_key=destination.stream_key or f"walbrook.{consumer}",
        batch_size=batch_size,
        timeout_s=destination.timeout_ms / 1000,
        url=url.get_secret_value() if url else None,
        host=destination.host or "localhost",
        port=destination.port,
        database=destination.database,
        username=destination.username,
        password=password.get_secret_value() if password else None,
        tls=bool(tls),
        tls_verify=checks.verify,
        tls_ca_file=str(checks.ca_file) if checks.ca_file else None,
        max_length=destination.max_length,
        max_age_s=destination.max_age_s,
        trim_exactly=destination.trim_exactly,
        generation=generation,
    )


def _kafka(
    destination: KafkaDestination,
    consumer: str,
    batch_size: int,
    source: str,
    grouping: Grouping,
    generation: Generation,
) -> Sink:
    # The client library is an extra, and loading it takes time.
    from sinks.kafka import ExactlyOnceKafkaSink, KafkaSink, NewTopics, RecordForm, client_settings

    form = RecordForm(
        consumer,
        destination.topic,
        destination.topic_without_table,
        grouping,
        tombstones=destination.tombstones,
        generation=generation,
    )
    asked = destination.create_topics
    create = NewTopics(asked.partitions, asked.replication_factor, asked.config) if asked else None
    settings = client_settings(destination)
    timeout_s = destination.timeout_ms / 1000
    if not destination.exactly_once:
        return KafkaSink(
            settings,
            form,
            batch_size=batch_size,
            timeout_s=timeout_s,
            compression=destination.compression,
            create=create,
        )
    cursor_topic = destination.cursor_topic or f"walbrook.cursor.{source}.{consumer}"
    return ExactlyOnceKafkaSink(
        settings,
        form,
        cursor_topic=generation.named(cursor_topic),
        transactional_id=cursor_topic,
        batch_size=batch_size,
        timeout_s=timeout_s,
        compression=destination.compression,
        create=create,
    )
