"""Turning what came off the wire into a batch: cursors, kinds and schemas by column. No I/O.

The reader only collects XLogData messages; here NumPy works out for all of them at once which
transaction each belongs to and which number it has in it. Invariant: the same WAL gives the same
cursors, however it is cut into batches, on whatever connection it comes. So only what the
transaction itself contains is counted: rows, truncated tables and logical messages, never Relation
or Type messages, which depend on the connection; ``numbering`` has the free numbers between them.

Here are the transactions that come whole; ``transaction_assembler`` has those that come in
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor, behind_transaction
from cdc.cursor_columns import at_or_above
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import ProtocolError
from cdc.replication.wire.annotations import AnnotationTracker
from cdc.replication.wire.numbering import Openings, OpenTransaction, needs_place
from cdc.replication.wire.relations import CatalogOf, Relations, Schema, no_catalog
from cdc.replication.wire.sealed import Sealed, sealed_of
from cdc.replication.wire.small_batch import MESSAGES_MAX, few_rows
from cdc.replication.wire.table_versions import TableVersions
from cdc.replication.wire.wire import BEGIN, COMMIT, CONTROLS, ROWS, TRUNCATE, Ints, Mask, Wire


@dataclass
class Sealer:
    """Carries what one batch must know of those before it, for one connection."""

    resume: Cursor = ORIGIN  # what is below was taken by an earlier connection
    catalog_of: CatalogOf = no_catalog
    codec: str = ""  # of the connection's texts, if they are not in UTF-8
    versions: TableVersions | None = None  # without them no schema change is written
    heartbeats: list[bytes] = field(default_factory=list)  # contents, of the batch sealed last
    relations: Relations = field(default_factory=Relations)
    received: int = 0  # messages in the batches before this one
    _open: OpenTransaction = field(default_factory=OpenTransaction)
    _listener: AnnotationTracker = field(default_factory=AnnotationTracker)
    _openings: Openings = field(default_factory=Openings)

    @property
    def in_transaction(self) -> bool:
        return self._open.in_progress

    def seal(self, messages: Sequence[bytes]) -> Sealed | None:
        """One batch of all ``messages``; None when nothing of them is for the log."""
        wire = Wire.join(messages)
        if CONTROLS[wire.kind].any():
            raise ProtocolError(
                "the server sends a transaction in pieces, which nobody asked for",
                fix="read this slot through an Intake",
            )
        self.heartbeats = []
        sealed = self.seal_wire(wire)
        self.received += len(wire)
        return sealed

    def seal_few(self, messages: Sequence[bytes]) -> Sealed | None:
        """The same for a few messages of usual transactions; None if they are not."""
        if len(messages) > MESSAGES_MAX or self._listener.in_force is not None:
            return None
        rows = few_rows(
            messages, self._open, self.resume, self.relations, self._openings.last, self.versions
        )
        if rows is None:
            return None
        self._open = rows.open
        self._openings.last |= rows.last_rows
        self.heartbeats = []
        self.received += len(messages)
        return self._ended(Sealed(rows.batch(), rows.schemas, rows.first, rows.high))

    def seal_wire(self, wire: Wire) -> Sealed | None:
        """The same for messages that were joined already, all of transactions that come whole."""
        cursors = self._number(wire)
        heard = self._listener.hear_wire(wire)
        # A truncate of several tables is one change a table, each with a cursor of its own.
        row, nth = wire.rows()
        lsn, idx = cursors.lsn[row], cursors.idx[row] + nth
        relation = wire.relation(row, nth)
        tables = self._tables_of(wire, row, relation, lsn, cursors.xid[row])
        idx = self._leave_free(idx, tables.opens, cursors, row)
        hidden = tables.own | self._heartbeats(wire)[row]
        above = at_or_above(lsn, idx, self.resume)
        self._meet(tables, above, lsn, idx, cursors.commit_ts[row])
        keep = ~hidden & above
        if not keep.any():
            return None
        row, nth, lsn, idx = row[keep], nth[keep], lsn[keep], idx[keep]
        raw = pa.RecordBatch.from_arrays(
            [
                pa.array(lsn),
                pa.array(idx),
                pa.array(cursors.commit_ts[row]),
                pa.array(cursors.xid[row]),
                pa.array(wire.kind[row]),
                pa.array(relation[keep].astype(np.uint32)),
                pa.array(tables.schema_id[keep]),
                wire.payload(row, nth),
            ],
            schema=RAW_SCHEMA,
        )
        sealed = sealed_of(raw, tables.schemas, heard.runs(row), heard.refusals(row, lsn, idx))
        if self.versions is not None:
            sealed = self.versions.into(sealed, self.resume)
        return self._ended(sealed)

    def _ended(self, sealed: Sealed) -> Sealed:
        """Behind a whole transaction nothing more comes at its LSN: the batch reaches beyond it.

        So a consumer that has taken the batch stands where existing rows may be placed.
        """
        if self._open.in_progress:
            return sealed
        return replace(sealed, high=behind_transaction(sealed.high))

    def _heartbeats(self, wire: Wire) -> Mask:
        found = np.zeros(len(wire), dtype=bool)
        beats = wire.heartbeats()
        if len(beats):
            found[beats] = True
            self.heartbeats += [wire.heartbeat_content(int(beat)) for beat in beats]
        return found

    def _number(self, wire: Wire) -> _Cursors:
        """Give every message its transaction and its number in it; remember how the batch ends."""
        is_begin = wire.kind == BEGIN
        begins = np.flatnonzero(is_begin)
        carried = self._open
        begin_lsn, begin_ts, begin_xid = wire.begins(begins)
        tx = np.cumsum(is_begin)
        tx_lsn = np.concatenate([[carried.lsn], begin_lsn])
        tx_ts = np.concatenate([[carried.commit_ts], begin_ts])
        tx_xid = np.concatenate([[carried.xid], begin_xid])

        weight = ROWS[wire.kind].astype(np.int64)
        truncates = np.flatnonzero(wire.kind == TRUNCATE)
        weight[truncates] = wire.truncated(truncates)
        loose = wire.outside_transactions()
        weight[loose] = 0
        self._require_transaction(wire, weight, is_begin)
        before = np.cumsum(weight) - weight
        tx_start = np.concatenate([[-carried.next_idx], before[begins]])
        cursors = _Cursors(
            tx_lsn[tx], before - tx_start[tx], tx_ts[tx], tx_xid[tx], tx, loose, carried.left_free
        )
        cursors.lsn[loose], cursors.commit_ts[loose] = wire.loose(loose)
        cursors.idx[loose] = 0
        cursors.xid[loose] = 0

        ends = np.flatnonzero(is_begin | (wire.kind == COMMIT))
        self._open = OpenTransaction(
            int(tx_lsn[-1]),
            int(tx_ts[-1]),
            int(tx_xid[-1]),
            int(weight.sum() - tx_start[-1]),
            0 if len(begins) else carried.left_free,
            bool(is_begin[ends[-1]]) if len(ends) else carried.in_progress,
        )
        return cursors

    def _require_transaction(self, wire: Wire, weight: Ints, is_begin: Mask) -> None:
        """Every counted change stands between a Begin and its Commit: else it has no cursor."""
        places = np.where(is_begin | (wire.kind == COMMIT), np.arange(len(wire)), -1)
        last = np.maximum.accumulate(places)
        inside = np.where(last < 0, self._open.in_progress, is_begin[last])
        if (weight[~inside] > 0).any():
            raise ProtocolError(
                "a change stands outside of every transaction",
                fix="read the stream from the Begin of a transaction on",
            )

    def _tables_of(self, wire: Wire, row: Ints, relation: Ints, lsn: Ints, xid: Ints) -> _Tables:
        """For each row the schema in force when it was sent, and what else its table says."""
        tables = _Tables(len(row))
        for known, rows in self.relations.in_force(wire, row, relation, self.received, self.codec):
            oid = known.relation.oid
            tables.opens[rows] = self._openings.among(oid, known.bare.schema_id, lsn[rows])
            if known.own:
                tables.own[rows] = True
                continue
            schema = known.schema(self.catalog_of, int(xid[rows[0]]))
            tables.schema_id[rows] = schema.schema_id
            tables.schemas[schema.schema_id] = schema.message
            if self.versions is not None and (
                oid in tables.changing or not self.versions.is_newest(oid, schema.schema_id)
            ):
                tables.changing.add(oid)
                tables.described.append((oid, schema, rows))
        return tables

    def _leave_free(self, number: Ints, opens: Mask, cursors: _Cursors, row: Ints) -> Ints:
        """The numbers with a free one before each row that needs it (``numbering``)."""
        free = needs_place(opens, number)
        if not len(row) or not (cursors.left_free or free.any()):
            return number
        tx = cursors.tx[row]
        count = np.concatenate([[0], np.cumsum(free)])
        before = count[np.searchsorted(tx, np.arange(cursors.tx[-1] + 1))]
        before[0] -= cursors.left_free
        self._open.left_free = int(count[-1] - before[-1])
        shift = count[1:] - before[tx]
        if len(cursors.loose):
            shift[np.isin(row, cursors.loose)] = 0
        found: Ints = number + shift
        return found

    def _meet(self, tables: _Tables, above: Mask, lsn: Ints, idx: Ints, commit_ts: Ints) -> None:
        """Hand on the first undecided row of each schema that is not the newest of its table."""
        for oid, schema, rows in tables.described:
            assert self.versions is not None
            if self.versions.is_newest(oid, schema.schema_id):
                continue
            floor = self.versions.undecided_from(oid)
            opened = rows[(tables.opens & above)[rows]]
            opened = opened[at_or_above(lsn[opened], idx[opened], floor)]
            if len(opened):
                at = int(opened[0])
                since = Cursor(int(lsn[at]), int(idx[at]))
                self.versions.meet(schema, since, int(commit_ts[at]))


class _Tables:
    """Of each row what is known of its table."""

    def __init__(self, rows: int) -> None:
        self.schema_id: npt.NDArray[np.uint64] = np.zeros(rows, dtype=np.uint64)
        self.own: Mask = np.zeros(rows, dtype=bool)
        self.opens: Mask = np.zeros(rows, dtype=bool)
        self.schemas: dict[int, bytes] = {}
        # Tables that may have a new version, and the rows of each of their schemas, in order.
        self.changing: set[int] = set()
        self.described: list[tuple[int, Schema, Ints]] = []


@dataclass(frozen=True)
class _Cursors:
    """By message; ``idx`` counts changes alone, ``tx`` the transactions that began here."""

    lsn: Ints
    idx: Ints
    commit_ts: Ints
    xid: Ints
    tx: Ints
    loose: Ints  # the messages outside of transactions
    left_free: int  # in the transaction that goes on from the batch before
