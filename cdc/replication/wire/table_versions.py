"""The versions of a source's tables as the reader meets them, and their rows of the log. Pure.

A version that differs from the last one known (``same_table``) is a schema change, and gets a row
of the log directly before its first row; the first version of a table gets none. Invariants:

- A version is recorded in ``walbrook.schema_versions`` before the batch with its first row goes
  into the log. So what the log holds, and all the more what Postgres may forget, is recorded.
- What is recorded is not decided again. When its first row comes again, after a crash between the
  two writes or because the log was lost, the same schema change is written from the record: with
  the same place (``numbering``), the same schema, the same bytes. Rows at or below the first row of
  a table's newest version decide nothing else, nor do rows that the log already has.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.annotations import AnnotationRun, cut_runs, joined_runs
from cdc.decoding.raw import RAW_SCHEMA, SCHEMA_CHANGE
from cdc.decoding.relation import parse_relation
from cdc.decoding.schema_change import same_table
from cdc.decoding.table_version import TableVersion
from cdc.replication.wire.relations import Schema
from cdc.replication.wire.sealed import Sealed, sealed_of


@dataclass
class _Table:
    """The newest version, and the ids of all schemas that were found to say the same."""

    newest: TableVersion
    ids: set[int] = field(default_factory=set)


class TableVersions:
    """What is known of a source's tables, for one connection."""

    def __init__(self, recorded: Iterable[TableVersion] = ()) -> None:
        """``recorded``: the newest version of each table, and all that may come again."""
        self._tables: dict[int, _Table] = {}
        self._new: list[TableVersion] = []
        # The schema changes whose first rows are still to come, in order.
        self._ahead: list[TableVersion] = []
        for version in sorted(recorded, key=_since):
            self._know(version)

    @property
    def is_pending(self) -> bool:
        """Whether the next batch may get a schema change, or versions to be recorded."""
        return bool(self._ahead or self._new)

    def is_newest(self, relation: int, schema_id: int) -> bool:
        table = self._tables.get(relation)
        return table is not None and schema_id in table.ids

    def undecided_from(self, relation: int) -> Cursor:
        """From where on rows of a table can be of a version that is not known."""
        table = self._tables.get(relation)
        if table is None:
            return ORIGIN
        lsn, idx = table.newest.since
        return Cursor(lsn, idx + 1)

    def meet(self, schema: Schema, since: Cursor, commit_ts: int) -> None:
        """A row at ``since``, undecided yet, opens its table with ``schema``."""
        relation = parse_relation(schema.message)
        table = self._tables.get(relation.oid)
        if table is None:
            version = TableVersion.first(schema.message, since, commit_ts)
        elif same_table(table.newest.relation, relation):
            table.ids.add(schema.schema_id)
            return
        else:
            version = table.newest.next(schema.message, since, commit_ts)
        self._know(version)
        self._new.append(version)

    def into(self, sealed: Sealed, resume: Cursor) -> Sealed:
        """A batch with the schema changes of its rows, and with the versions to be recorded.

        Nothing below ``resume`` goes into it.
        """
        if not self._ahead and not self._new:
            return sealed
        new, self._new = self._new, []
        last = Cursor(sealed.high.lsn, sealed.high.idx - 1)
        count = bisect_right(self._ahead, last, key=_since)
        due, self._ahead = self._ahead[:count], self._ahead[count:]
        due = [version for version in due if version.place >= resume]
        return replace(with_schema_changes(sealed, due), versions=tuple(new))

    def _know(self, version: TableVersion) -> None:
        self._tables[version.relation.oid] = _Table(version, {version.schema_id})
        if version.record is not None:
            insort(self._ahead, version, key=_since)


def with_schema_changes(sealed: Sealed, versions: Sequence[TableVersion]) -> Sealed:
    """The batch with a schema change before the first row of each of these versions.

    A version whose first row is not in the batch adds nothing.
    """
    lsn, idx = (sealed.raw.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
    found: list[tuple[int, TableVersion]] = []
    for version in versions:
        at = np.flatnonzero((lsn == version.since.lsn) & (idx == version.since.idx))
        if len(at):
            found.append((int(at[0]), version))
    if not found:
        return sealed
    pieces: list[pa.RecordBatch] = []
    runs: list[tuple[Sequence[AnnotationRun], int]] = []
    starts = [0, *(at for at, _ in found), sealed.raw.num_rows]
    for number, (start, stop) in enumerate(itertools.pairwise(starts)):
        if number:
            pieces.append(_as_row(found[number - 1][1]))
            runs.append(((), 1))
        pieces.append(sealed.raw.slice(start, stop - start))
        runs.append((tuple(cut_runs(sealed.annotations, start, stop)), stop - start))
    schemas = {version.schema_id: version.schema for _, version in found}
    return sealed_of(
        pa.concat_batches(pieces),
        {**sealed.schemas, **schemas},
        joined_runs(runs),
        sealed.refused,
    )


def _as_row(version: TableVersion) -> pa.RecordBatch:
    """The schema change as a row of the log; it belongs to no transaction."""
    assert version.record is not None
    row = {
        "commit_lsn": version.place.lsn,
        "commit_idx": version.place.idx,
        "commit_ts": version.commit_ts,
        "xid": 0,
        "kind": SCHEMA_CHANGE,
        "relation": version.relation.oid,
        "schema_id": version.schema_id,
        "payload": bytes([SCHEMA_CHANGE]) + version.record,
    }
    return pa.RecordBatch.from_pylist([row], schema=RAW_SCHEMA)


def _since(version: TableVersion) -> Cursor:
    return version.since
