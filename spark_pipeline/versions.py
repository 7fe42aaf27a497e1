"""The table versions that a lane passes: what is new, and which consumer must be told of it.

The newest version of each table is loaded at the lane's start, and again when something is met that
another lane may have recorded meanwhile; the transitions of every micro-batch are held against it.
What must always hold: what was recorded decides, whatever a log that was read
again says of rows at or below it; a version found here is told to nobody before a micro-batch whose
settlement records it; every consumer is told of each change once, unless its sink fails.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import xxhash

from cdc.change import CHANGE_SCHEMA
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.decoding.relation import Relation, parse_relation
from cdc.decoding.schema_change import change_between, same_table
from cdc.decoding.versions import Transition, decode_transitions
from cdc.state.schema_versions import (
    Announcement,
    LatestVersion,
    NewVersion,
    announcements,
    latest_versions,
)
from spark_pipeline.announce import BatchRows, place, reaches
from spark_pipeline.exchange import SliceMarker

Look = Callable[[int], BatchRows]
"""Reads a batch of the log by its number."""

_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass
class _Table:
    """The version in force, and the ids of all schemas that were found to say the same."""

    version: int
    relation: Relation
    since: Cursor
    ids: set[int]


class Versions:
    """What is known of a source's tables, for one lane."""

    def __init__(
        self, latest: dict[int, LatestVersion], announced: Iterable[Announcement] = ()
    ) -> None:
        self._tables = {
            oid: _Table(
                known.version,
                parse_relation(known.schema),
                known.since,
                {xxhash.xxh3_64_intdigest(known.schema)},
            )
            for oid, known in latest.items()
        }
        self._announced = list(announced)

    @classmethod
    def load(cls, state: Connection, source: str, lowest: Cursor) -> Versions:
        """As recorded; ``lowest`` is where the consumer stands that is furthest behind."""
        return cls(latest_versions(state, source), announcements(state, source, _kept_from(lowest)))

    def is_known(self, transition: Transition) -> bool:
        """Whether it is to a version that was met before, or lies in the past of its table."""
        table = self._tables.get(transition.relation)
        return table is not None and (
            transition.schema_id in table.ids or transition.cursor <= table.since
        )

    def knows(self, slices: Iterable[SliceMarker]) -> bool:
        """Whether all transitions of these slices are known."""
        return all(
            self.is_known(transition)
            for piece in slices
            for transition in decode_transitions(piece.versions)
        )

    def pass_over(
        self, slices: Iterable[SliceMarker], standing: Collection[Cursor], look: Look
    ) -> list[NewVersion]:
        """Take note of the transitions of ordered slices; the versions that are new by them.

        ``standing`` are the consumers' cursors before anything of the slices is settled.
        """
        found: list[NewVersion] = []
        seen: dict[int, BatchRows] = {}
        for piece in slices:
            for transition in decode_transitions(piece.versions):
                if self.is_known(transition):
                    continue
                if piece.batch_idx not in seen:
                    seen = {piece.batch_idx: look(piece.batch_idx)}
                table = self._tables.get(transition.relation)
                new = self._meet(table, transition, seen[piece.batch_idx], standing)
                found += [new] if new is not None else []
        return found

    def between(self, start: Cursor, end: Cursor) -> pa.RecordBatch | None:
        """The schema changes for a consumer that goes from ``start`` to ``end``, as changes."""
        first, last = (
            bisect_left(self._announced, reaches(cursor), key=_cursor) for cursor in (start, end)
        )
        if first >= last:
            return None
        return pa.RecordBatch.from_pylist(
            [_as_change(told) for told in self._announced[first:last]], schema=CHANGE_SCHEMA
        )

    def forget_below(self, lowest: Cursor) -> None:
        """Everyone has passed ``lowest``: what was told below it is told."""
        floor = _kept_from(lowest)
        if self._announced and self._announced[0].cursor < floor:
            del self._announced[: bisect_left(self._announced, floor, key=_cursor)]

    def _meet(
        self,
        table: _Table | None,
        transition: Transition,
        rows: BatchRows,
        standing: Collection[Cursor],
    ) -> NewVersion | None:
        schema = rows.schemas[transition.schema_id]
        relation, since = parse_relation(schema), transition.cursor
        if table is not None and same_table(table.relation, relation):
            table.ids.add(transition.schema_id)
            return None
        version = table.version + 1 if table else 1
        committed_at = _EPOCH + timedelta(microseconds=rows.committed_us(since.lsn))
        told: Announcement | None = None
        if table is not None:
            told = Announcement.of(
                self._free(place(rows, transition.relation, since, standing)),
                committed_at,
                relation.namespace,
                relation.name,
                change_between(table.relation, relation, version),
            )
            insort(self._announced, told, key=_cursor)
        self._tables[transition.relation] = _Table(version, relation, since, {transition.schema_id})
        return NewVersion(version, relation, schema, since, committed_at, told)

    def _free(self, lsn: int) -> Cursor:
        """The next number at ``lsn`` that no announcement has ever had."""
        return Cursor(
            lsn, 1 + max((t.cursor.idx for t in self._announced if t.cursor.lsn == lsn), default=0)
        )


def _kept_from(lowest: Cursor) -> Cursor:
    """Announcements are kept by whole transactions, so that no number is given twice."""
    return Cursor(max(lowest.lsn - 2, 0), 0)


def _cursor(told: Announcement) -> Cursor:
    return told.cursor


def _as_change(told: Announcement) -> dict[str, object]:
    return {
        "commit_lsn": told.cursor.lsn,
        "commit_idx": told.cursor.idx,
        "commit_timestamp": told.committed_at,
        "xid": 0,
        "table_schema": told.table_schema,
        "table_name": told.table_name,
        "action": "schema_change",
        "record": told.record,
        "record_pks": "[]",
    }
