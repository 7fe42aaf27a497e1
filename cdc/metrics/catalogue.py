"""All that processes measure, by name. ``/metrics`` has each of them, with or without series."""

from __future__ import annotations

from typing import Final

from cdc.metrics.cells import Count, Distribution, Level
from cdc.metrics.families import Family, counter, gauge, histogram

_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip
_OF_CONSUMER: Final = ("source", "consumer")
_OF_STAGE: Final = ("stage", "source", "consumer")

# The reader.
INGEST_SECONDS = histogram(
    "ingest_seconds", "From the commit of a change to its place in the log.", _SECONDS, "source"
)
INGESTED_MESSAGES = counter("ingested_messages", "Changes put into the log.", "source")
RECEIVED_BYTES = counter("received_bytes", "Bytes that the source sent.", "source")
LOG_BATCHES = counter("log_batches", "Batches put into the log.", "source")
LOG_WRITTEN_BYTES = counter("log_written_bytes", "Bytes put into the log.", "source")
LOG_SYNC_SECONDS = histogram(
    "log_sync_seconds", "How long the disk took to make the log durable.", _SECONDS, "source"
)
LOG_SEGMENTS = gauge("log_segments", "Sealed segments of the log.", "source")
LOG_DISK_FREE = gauge("log_disk_free_bytes", "Bytes left on the disk of the log.", "source")
MEMORY_FREE = gauge("memory_available_bytes", "Memory left for the service.", "source")
SLOT_CONFIRMED_TO_CURRENT = gauge(
    "slot_confirmed_to_current_bytes", "WAL that the reader has not confirmed.", "source"
)
SLOT_RESTART_TO_CONFIRMED = gauge(
    "slot_restart_to_confirmed_bytes", "Confirmed WAL that open transactions pin.", "source"
)
SLOT_RETAINED = gauge("slot_retained_bytes", "WAL that the slot keeps.", "source")
SLOT_SAFE = gauge("slot_safe_wal_bytes", "safe_wal_size; absent without a limit.", "source")
SLOT_WAL_STATUS = gauge("slot_wal_status", "1 for its wal_status.", "source", "status")
SLOT_DECODED = gauge(
    "slot_decoded", "As pg_stat_replication_slots counts since its reset.", "source", "counter"
)
OLDEST_TRANSACTION = gauge(
    "source_oldest_transaction_seconds", "Age of the oldest transaction that pins WAL.", "source"
)

# The feed and the settler.
DECODE_SECONDS = histogram("decode_seconds", "Decoding a range of the log.", _SECONDS, "source")
DECODED_MESSAGES = counter("decoded_messages", "Changes decoded for the feed.", "source")
FEED_BYTES = gauge("feed_bytes", "Decoded changes that lie in the feed.", "source")
SETTLE_SECONDS = histogram("settle_seconds", "A settling transaction.", _SECONDS, "source")

# The workers.
WAIT_SECONDS = histogram(
    "wait_seconds", "From the feed to the worker that takes a range.", _SECONDS, *_OF_CONSUMER
)
DELIVERY_SECONDS = histogram(
    "delivery_seconds", "Delivering a share of a range.", _SECONDS, *_OF_CONSUMER
)
END_TO_END_SECONDS = histogram(
    "end_to_end_seconds", "From the commit of a change to its delivery.", _SECONDS, *_OF_CONSUMER
)
DELIVERY_ATTEMPTS = counter("delivery_attempts", "Deliveries that were tried.", *_OF_CONSUMER)
DELIVERY_SUCCESSES = counter("delivery_successes", "Deliveries that went well.", *_OF_CONSUMER)
DELIVERY_FAILURES = counter(
    "delivery_failures", "Deliveries that failed, by the kind of the error.", *_OF_CONSUMER, "kind"
)
DELIVERED_MESSAGES = counter("delivered_messages", "Messages delivered.", *_OF_CONSUMER)
DELIVERED_BYTES = counter("delivered_bytes", "Bytes of texts in them, at most.", *_OF_CONSUMER)
MATCHED_MESSAGES = counter(
    "matched_messages", "Changes that a consumer takes: delivered, queued or dead.", *_OF_CONSUMER
)
FILTERED_MESSAGES = counter(
    "filtered_messages", "Changes that a consumer does not take.", *_OF_CONSUMER
)
WATERMARKS_EMITTED = counter("watermarks_emitted", "Watermarks sent to a sink.", "consumer")

# Where time goes.
PHASE_SECONDS = counter("phase_seconds", "Time by phase.", *_OF_STAGE, "phase")
BUSY_RATIO = gauge("busy_ratio", "Share of the last seconds without waiting.", *_OF_STAGE)

ALL: Final[tuple[Family[Count] | Family[Level] | Family[Distribution], ...]] = tuple(
    each for each in globals().values() if isinstance(each, Family)
)
