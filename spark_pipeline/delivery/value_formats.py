"""What a source's consumers want of decode together, and what each of them then sees. Pure.

A batch is decoded once for all of them, with every form that somebody wants beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from cdc.config import PostgresDestination, Sink
from cdc.decoding.format import DEFAULT_FORMAT, PLAIN, TEXTS, ValueFormat, Wanted


def form_of(consumer: Sink) -> ValueFormat:
    """How a consumer wants values to be written; its windows read what decode wrote."""
    if consumer.window is not None:
        return DEFAULT_FORMAT
    return ValueFormat(consumer.timestamp_format, consumer.number_format)


def wanted_by(consumers: Sequence[Sink]) -> Wanted:
    """Each form once, in the order of the consumers; old rows if somebody shows them."""
    forms = tuple(dict.fromkeys(form_of(consumer) for consumer in consumers))
    return Wanted(
        forms or PLAIN.formats,
        before=any(map(shows_before, consumers)),
        texts=any(map(takes_texts, consumers)),
    )


def view_of(changes: pa.RecordBatch, wanted: Wanted, consumer: Sink) -> pa.RecordBatch:
    """A consumer's own view of changes that were decoded as ``wanted``."""
    view = wanted.view(changes, form_of(consumer))
    # Nobody else pays for old rows and texts: every column is copied when rows are selected.
    unused = ["before"] if wanted.before and not shows_before(consumer) else []
    unused += TEXTS if wanted.texts and not takes_texts(consumer) else ()
    return view.drop_columns(unused) if unused else view


def shows_before(consumer: Sink) -> bool:
    """Whether its messages hold the row as it was."""
    return consumer.shape == "debezium"


def takes_texts(consumer: Sink) -> bool:
    """Whether its destination has typed columns, which are written from the source's own texts."""
    destination = consumer.destination
    return isinstance(destination, PostgresDestination) and destination.mode != "events"
