"""What a source's consumers want of decode together, and what each of them then sees. Pure.

A batch is decoded once for all of them, with every form that somebody wants beside the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pyarrow as pa

from cdc.config import Sink
from cdc.decoding.format import DEFAULT_FORMAT, PLAIN, Numbers, Timestamps, ValueFormat, Wanted


def form_of(consumer: Sink) -> ValueFormat:
    """How a consumer wants values to be written; its windows read what decode wrote."""
    if consumer.window is not None:
        return DEFAULT_FORMAT
    return _format(consumer.timestamp_format, consumer.number_format)


@cache
def _format(timestamps: Timestamps, numbers: Numbers) -> ValueFormat:
    """Each of the few once: it is asked for with every range."""
    return ValueFormat(timestamps, numbers)


def wanted_by(consumers: Sequence[Sink]) -> Wanted:
    """Each form once, in the order of the consumers; old rows if somebody shows them.

    The same for the columns that somebody's event times stand in.
    """
    forms = tuple(dict.fromkeys(form_of(consumer) for consumer in consumers))
    times = dict.fromkeys(name for consumer in consumers for name in time_columns(consumer))
    return Wanted(forms or PLAIN.formats, any(map(shows_before, consumers)), tuple(times))


def time_columns(consumer: Sink) -> list[str]:
    """The columns in which a consumer's event times stand."""
    if consumer.ordering != "event_time" or consumer.event_time is None:
        return []
    return consumer.event_time.columns_in_rows


def view_of(changes: pa.RecordBatch, wanted: Wanted, consumer: Sink) -> pa.RecordBatch:
    """A consumer's own view of changes that were decoded as ``wanted``."""
    view = wanted.view(changes, form_of(consumer), time_columns(consumer))
    # Nobody else pays for old rows: every column is copied when rows are selected.
    return view if shows_before(consumer) or not wanted.before else view.drop_columns(["before"])


def shows_before(consumer: Sink) -> bool:
    """Whether its messages hold the row as it was."""
    return consumer.shape == "debezium"
