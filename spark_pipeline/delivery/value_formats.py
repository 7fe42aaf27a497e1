"""What a source's consumers want of decode together, and what each of them then sees. Pure.

A batch is decoded once for all of them, with every form that a consumer wants beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pyarrow as pa

from cdc.config import KafkaDestination, SinkConfig
from cdc.decoding.format import (
    DEFAULT_FORMAT,
    KEY,
    OLD_KEY,
    PLAIN,
    ROW_SCHEMA,
    TEXTS,
    Documents,
    Numbers,
    Timestamps,
    ValueFormat,
    Wanted,
)


def form_of(consumer: SinkConfig) -> ValueFormat:
    """How a consumer wants values to be written; its windows read what decode wrote."""
    if consumer.window is not None:
        return DEFAULT_FORMAT
    documents: Documents = "text" if shows_schemas(consumer) else "embedded"
    return _format(consumer.timestamp_format, consumer.number_format, documents)


@cache
def _format(timestamps: Timestamps, numbers: Numbers, documents: Documents) -> ValueFormat:
    """Each of the few once: it is asked for with every range."""
    return ValueFormat(timestamps, numbers, documents)


def wanted_by(consumers: Sequence[SinkConfig]) -> Wanted:
    """Each form once, in the order of the consumers; old rows if a shape shows them.

    The same for the columns that event times stand in.
    """
    forms = tuple(dict.fromkeys(form_of(consumer) for consumer in consumers))
    times = dict.fromkeys(name for consumer in consumers for name in time_columns(consumer))
    return Wanted(
        forms or PLAIN.formats,
        before=any(map(shows_before, consumers)),
        times=tuple(times),
        keyed=any(map(shows_keys, consumers)),
        described=any(map(shows_schemas, consumers)),
        texts=any(map(takes_texts, consumers)),
    )


def wanted_of_reads(consumer: SinkConfig) -> Wanted:
    """What one consumer wants of rows that a backfill read: no JSON if its sink writes none."""
    wanted = wanted_by([consumer])
    bare = takes_texts(consumer) and holds_tables(consumer)
    return replace(wanted, formats=()) if bare else wanted


def holds_tables(consumer: SinkConfig) -> bool:
    """Whether it is given columns of rows as they are, in large batches, and no messages.

    A transform makes messages, and a bound that its operator gave is one of messages.
    """
    plain = "transform" not in consumer.expressions and consumer.max_message_bytes is None
    return plain and consumer.destination.holds_tables


def time_columns(consumer: SinkConfig) -> list[str]:
    """The columns in which a consumer's event times stand."""
    if consumer.ordering != "event_time" or consumer.event_time is None:
        return []
    return consumer.event_time.columns_in_rows


def view_of(changes: pa.RecordBatch, wanted: Wanted, consumer: SinkConfig) -> pa.RecordBatch:
    """A consumer's own view of changes that were decoded as ``wanted``."""
    view = wanted.view(changes, form_of(consumer), time_columns(consumer))
    # A form costs only the consumers that ask for it: every column is copied when rows are
    # selected.
    unasked = [
        *(["before"] if wanted.before and not shows_before(consumer) else []),
        *([KEY, OLD_KEY] if wanted.keyed and not shows_keys(consumer) else []),
        *([ROW_SCHEMA] if wanted.described and not shows_schemas(consumer) else []),
        *(TEXTS if wanted.texts and not takes_texts(consumer) else []),
    ]
    return view.drop_columns(unasked) if unasked else view


def shows_before(consumer: SinkConfig) -> bool:
    """Whether its messages hold the row as it was."""
    return consumer.shape == "debezium"


def shows_keys(consumer: SinkConfig) -> bool:
    """Whether its messages have a key that is an object."""
    in_commit_order = consumer.shape == "debezium" and consumer.ordering == "commit"
    return in_commit_order and isinstance(consumer.destination, KafkaDestination)


def shows_schemas(consumer: SinkConfig) -> bool:
    """Whether its messages say the schema of their rows."""
    return isinstance(consumer.destination, KafkaDestination) and consumer.destination.schemas


def takes_texts(consumer: SinkConfig) -> bool:
    """Whether its destination has typed columns, which are written from the source's own texts."""
    return consumer.destination.takes_texts
