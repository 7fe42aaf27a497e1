"""Giving the rows of a transaction their cursors, once it is known where and whether it committed.

Invariant: the numbers are those of the surviving rows in order, as if nothing else had ever been
sent; memory is bounded by one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.cursor_columns import at_or_above
from cdc.decoding.annotations import AnnotationRun, joined_runs
from cdc.decoding.raw import RAW_SCHEMA
from cdc.decoding.relation import parse_relation
from cdc.replication.spill.spill_file import SpilledRows
from cdc.replication.wire.annotations import AnnotationTracker, RefusedAnnotation
from cdc.replication.wire.numbering import Openings, needs_place
from cdc.replication.wire.relations import CatalogOf, Schema, noted
from cdc.replication.wire.sealed import Sealed, sealed_of
from cdc.replication.wire.table_versions import TableVersions
from cdc.replication.wire.wire import Ints, Mask


@dataclass(frozen=True)
class StreamedCommit:
    """A commit: whose, where, when, and which subtransactions are no part of it."""

    xid: int
    commit_lsn: int
    commit_ts: int
    aborted: frozenset[int]


@dataclass(frozen=True)
class BatchLimits:
    """How large a batch may get before it is handed on."""

    rows: int = 16_384
    bytes: int = 4 << 20


@dataclass
class Publisher:
    """The rows of one committed transaction, numbered in order."""

    outcome: StreamedCommit
    resume: Cursor
    catalog_of: CatalogOf
    skipped: Callable[[], None] = lambda: None  # called for each frame that is not for the log
    versions: TableVersions | None = None  # without them no schema change is written
    _next_idx: int = 0  # counts changes alone
    _left_free: int = 0  # numbers that were left free between them
    _openings: Openings = field(default_factory=Openings)
    _listener: AnnotationTracker = field(default_factory=AnnotationTracker)
    _schemas: dict[int, Schema] = field(default_factory=dict)  # by the bare message's hash

    def batches(self, spilled: Iterable[SpilledRows], limits: BatchLimits) -> Iterator[Sealed]:
        """Everything that is not below ``resume``, in batches within ``limits``.

        Only a frame that is itself larger makes a larger batch.
        """
        held: list[_Numbered] = []
        rows = size = 0
        for numbered in map(self._numbered, spilled):
            if numbered is None:
                self.skipped()
                continue
            raw = numbered.raw
            if held and (rows + raw.num_rows > limits.rows or size + raw.nbytes > limits.bytes):
                yield self._sealed(held)
                held, rows, size = [], 0, 0
            held.append(numbered)
            rows += raw.num_rows
            size += raw.nbytes
        if held:
            yield self._sealed(held)

    def _numbered(self, spilled: SpilledRows) -> _Numbered | None:
        """A frame's surviving rows with their cursors; None if none of them is for the log."""
        rows, outcome = spilled.rows, self.outcome
        alive = ~np.isin(rows.column("xid").to_numpy(), list(outcome.aborted))
        idx, opens = self._number(rows, alive)
        heard = self._listener.hear_rows(
            rows.column("kind"), rows.column("payload"), np.flatnonzero(alive)
        )
        hidden = rows.column("hidden").to_numpy(zero_copy_only=False)
        lsn = np.full(len(alive), outcome.commit_lsn)
        keep = alive & ~hidden & at_or_above(lsn, idx, self.resume)
        count = int(keep.sum())
        if not count:
            return None
        if count < len(keep):
            rows = rows.filter(pa.array(keep))
        kept, lsn, idx, opens = np.flatnonzero(keep), lsn[keep], idx[keep], opens[keep]
        schema_ids = self._schema_ids(rows.column("schema_id"), spilled.schemas)
        self._meet(np.flatnonzero(opens), rows, idx)
        raw = pa.RecordBatch.from_arrays(
            [
                pa.array(lsn),
                pa.array(idx),
                pa.array(np.full(count, outcome.commit_ts)),
                pa.array(np.full(count, outcome.xid)),
                rows.column("kind"),
                rows.column("relation"),
                schema_ids,
                rows.column("payload"),
            ],
            schema=RAW_SCHEMA,
        )
        return _Numbered(raw, heard.runs(kept), heard.refusals(kept, lsn, idx))

    def _number(self, rows: pa.RecordBatch, alive: Mask) -> tuple[Ints, Mask]:
        """Of each row its number, and whether it opens its table; nonsense for those not alive."""
        number = self._next_idx + np.cumsum(alive) - alive
        self._next_idx += int(alive.sum())
        relation, described = (
            rows.column(name).to_numpy()[alive] for name in ("relation", "schema_id")
        )
        opens = np.zeros(len(alive), dtype=bool)
        opens[alive] = self._openings.within(
            self.outcome.commit_lsn, relation.astype(np.int64), described
        )
        left_free = self._left_free + np.cumsum(needs_place(opens, number))
        self._left_free = int(left_free[-1]) if len(left_free) else self._left_free
        return number + left_free, opens

    def _meet(self, opened: Ints, rows: pa.RecordBatch, idx: Ints) -> None:
        """Hand on the rows that open their tables with a schema that is not their newest."""
        if self.versions is None:
            return
        relation, bare = (rows.column(name).to_numpy() for name in ("relation", "schema_id"))
        for at in opened.tolist():
            oid, schema = int(relation[at]), self._schemas[int(bare[at])]
            since = Cursor(self.outcome.commit_lsn, int(idx[at]))
            if self.versions.is_newest(oid, schema.schema_id):
                continue
            if since >= self.versions.undecided_from(oid):
                self.versions.meet(schema, since, self.outcome.commit_ts)

    def _schema_ids(self, bare: pa.Array, messages: Mapping[int, bytes]) -> pa.Array:
        """The ids of the schemas as the log keeps them; here the catalog is asked."""
        found, inverse = np.unique(bare.to_numpy(), return_inverse=True)
        ids = np.zeros(len(found), dtype=np.uint64)
        for at, bare_id in enumerate(found.tolist()):
            if bare_id == 0:
                continue
            if bare_id not in self._schemas:
                message = messages[bare_id]
                self._schemas[bare_id] = noted(
                    message, parse_relation(message), self.catalog_of, self.outcome.xid
                )
            ids[at] = self._schemas[bare_id].schema_id
        return pa.array(ids[inverse])

    def _sealed(self, held: list[_Numbered]) -> Sealed:
        raw = held[0].raw
        if len(held) > 1:
            raw = pa.Table.from_batches([one.raw for one in held]).combine_chunks().to_batches()[0]
        schemas = {schema.schema_id: schema.message for schema in self._schemas.values()}
        runs = joined_runs([(one.runs, one.raw.num_rows) for one in held])
        refused = [refused for one in held for refused in one.refused]
        sealed = sealed_of(raw, schemas, runs, refused)
        return sealed if self.versions is None else self.versions.into(sealed, self.resume)


@dataclass(frozen=True)
class _Numbered:
    """What is for the log of one frame of the spill."""

    raw: pa.RecordBatch
    runs: Sequence[AnnotationRun]
    refused: Sequence[RefusedAnnotation]
