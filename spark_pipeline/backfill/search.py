"""The end of the search of the log for changes that left out values of a table's rows.

The worker searches the log up to where it delivers rows of a chunk. Of a chunk without rows it
delivers none, and a row that was moved out of it meanwhile may lie in blocks that were read before.
Rows that are read by their keys may get other keys before that: they are followed.

Invariants: a backfill ends when the log was searched from where its first chunk was read to where
its last one was. No row that was to be read by its key is lost when that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from typing import Any

import psycopg

from cdc.backfill.log_scan import incomplete_keys, moved_keys
from cdc.backfill.table import describe_table
from cdc.connection import Connection
from cdc.cursor import Cursor, idle_place
from cdc.log.open import open_log
from cdc.state.backfill_keys import KEYS_MAX, record_search, search_left, searched_to
from cdc.state.backfills import Backfill, fail
from spark_pipeline.backfill.pieces import TOO_MANY_KEYS
from spark_pipeline.capacity.backlog import end_of
from spark_pipeline.feed.stage_settings import StageSettings


def is_searched(
    state: Connection,
    source: Callable[[], psycopg.Connection[Any]],
    settings: StageSettings,
    backfill: Backfill,
) -> bool:
    """Whether the search is at its end; goes on with it once the log is there."""
    left = search_left(state, backfill.id)
    if left is None:
        return True
    table = describe_table(source(), settings.publication, backfill.table)
    since, until = Cursor(left[0], 0), idle_place(left[1])
    with closing(open_log(settings.log_directory)) as log:
        if end_of(log) < until:
            return False
        keys = incomplete_keys(log, table.relation.oid, since, until)
    place = (settings.source, settings.term, backfill.id, until.lsn)
    if record_search(state, *place, keys) > KEYS_MAX:
        fail(state, backfill.id, TOO_MANY_KEYS)
        return False
    return True


def is_followed(
    state: Connection,
    settings: StageSettings,
    backfill: Backfill,
    oid: int,
    keys: Collection[Sequence[str]],
    read_lsn: int,
) -> bool:
    """Whether the log reaches to where rows were read by these keys.

    If it does, other keys that the rows got before that are recorded, to be read next.
    """
    until = idle_place(read_lsn)
    with closing(open_log(settings.log_directory)) as log:
        if end_of(log) < until:
            return False
        searched = searched_to(state, backfill.id)
        if searched is None or not (since := Cursor(searched, 0)) < until:
            return True
        found = moved_keys(log, oid, since, until, keys)
    if found:
        record_search(state, settings.source, settings.term, backfill.id, searched, found)
    return True
