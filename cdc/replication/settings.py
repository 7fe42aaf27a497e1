"""What a reader needs to know, and how the configuration says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc.config import Config
from cdc.log.writer import Durability, Retention, SegmentLimits, TierSettings
from cdc.replication.machine import MachineBounds
from cdc.replication.options import StreamOptions
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.replication.stream import SILENCE_S

_BATCH: Final = BatchLimits()
_SEGMENTS: Final = SegmentLimits()
_RETENTION: Final = Retention(settled_s=86_400, settled_bytes=4 << 30, bytes_max=16 << 30)
_STREAM: Final = StreamOptions()
_MACHINE: Final = MachineBounds()


@dataclass(frozen=True)
class ReaderSettings:
    """What a reader needs to know of its source and its log; ``term`` is this start."""

    source: str
    term: int
    dsn: str
    slot: str
    publication: str
    state_dsn: str
    log_directory: Path
    durability: Durability = "fsync"
    batch: BatchLimits = _BATCH
    linger_ms: int = 5
    segments: SegmentLimits = _SEGMENTS
    retention: Retention = _RETENTION
    tier: TierSettings | None = None
    stream: StreamOptions = _STREAM
    spill_bytes_max: int = 8 << 30
    heartbeat_s: float = 10.0
    primary_dsn: str | None = None
    long_transaction_s: float = 900.0
    machine: MachineBounds = _MACHINE
    idle_s: float = 10.0
    silence_s: float = SILENCE_S
    pace_s: float = 1.0
    """How often the reader reports its position to the source and to the state database."""


def settings_of(config: Config, source: str, term: int) -> ReaderSettings:
    """What the configuration says of one source and its log, for one start of the service."""
    database, log, health = config.database(source), config.log, config.service.health
    return ReaderSettings(
        source=database.name,
        term=term,
        dsn=database.dsn(),
        slot=database.slot.name,
        publication=database.publication.name,
        state_dsn=config.state_dsn(),
        log_directory=log.directory / database.name,
        durability=log.durability,
        batch=BatchLimits(log.batch_rows, log.batch_bytes),
        linger_ms=log.linger_ms,
        segments=SegmentLimits(log.segment_bytes, log.segment_rows, log.segment_age_s),
        retention=Retention(log.retain_s, log.retain_bytes, log.max_bytes, log.on_full),
        tier=TierSettings(log.tier.url, log.tier.hot_bytes) if log.tier else None,
        stream=StreamOptions(
            database.stream_transactions, database.slot.two_phase, database.origin
        ),
        # Rows that wait for their commit share the disk with the log.
        spill_bytes_max=log.max_bytes // 2,
        heartbeat_s=database.heartbeat_s,
        primary_dsn=database.primary_dsn(),
        long_transaction_s=health.long_transaction_s,
        machine=MachineBounds(health.min_memory, health.min_disk),
    )
