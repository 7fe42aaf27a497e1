"""Turning what came off the wire into a batch: cursors, kinds and schemas by column. No I/O.

The reader only collects XLogData messages; here NumPy works out for all of them at once which
transaction each belongs to and which number it has in it. What must always hold: the same WAL
gives the same cursors, however it is cut into batches, on whatever connection it comes. So only
what the transaction itself contains is counted: rows, truncated tables and logical messages, never
Relation or Type messages, which depend on the connection.

Here are the transactions that come whole; ``intake`` has those that come in pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.annotations import Run, carried_bytes, cut_runs
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import ProtocolError
from cdc.replication.annotations import Listener, Refused
from cdc.replication.relations import CatalogOf, Relations, no_catalog
from cdc.replication.wire import BEGIN, COMMIT, CONTROLS, ROWS, TRUNCATE, Ints, Mask, Wire

_CARRIED_BYTES_MAX: Final = 32 << 20


@dataclass(frozen=True)
class Sealed:
    """A batch ready for the log."""

    raw: pa.RecordBatch
    schemas: Mapping[int, bytes]
    first: Cursor
    high: Cursor
    annotations: Sequence[Run] = ()  # which of its rows carry one
    refused: Sequence[Refused] = ()  # those of its rows that should have been one

    def parts(self) -> Iterator[Sealed]:
        """The same rows in batches whose texts, once a row has its own, stay within bounds.

        A text is here once, but each change that carries it is as much longer for everyone behind.
        """
        if carried_bytes(self.annotations) <= _CARRIED_BYTES_MAX:
            yield self
            return
        size = np.zeros(self.raw.num_rows, dtype=np.int64)
        for run in self.annotations:
            size[run.start : run.stop] = len(run.text)
        part = (np.cumsum(size) - size) // _CARRIED_BYTES_MAX
        cuts = (np.flatnonzero(np.diff(part)) + 1).tolist()
        for start, stop in itertools.pairwise([0, *cuts, self.raw.num_rows]):
            yield sealed_of(
                self.raw.slice(start, stop - start),
                self.schemas,
                tuple(cut_runs(self.annotations, start, stop)),
                self.refused if start == 0 else (),
            )


@dataclass
class _Open:
    """The transaction that the last batch ended in, or the one it ended with."""

    lsn: int = 0
    commit_ts: int = 0
    xid: int = 0
    next_idx: int = 0
    in_progress: bool = False


@dataclass
class Sealer:
    """Carries what one batch must know of those before it, for one connection."""

    resume: Cursor = ORIGIN  # what is below was taken by an earlier connection
    catalog_of: CatalogOf = no_catalog
    codec: str = ""  # of the connection's texts, if they are not in UTF-8
    heartbeats: list[bytes] = field(default_factory=list)  # contents, of the batch sealed last
    relations: Relations = field(default_factory=Relations)
    received: int = 0  # messages in the batches before this one
    _open: _Open = field(default_factory=_Open)
    _listener: Listener = field(default_factory=Listener)

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

    def seal_wire(self, wire: Wire) -> Sealed | None:
        """The same for messages that were joined already, all of transactions that come whole."""
        cursors = self._number(wire)
        heard = self._listener.hear_wire(wire)
        # A truncate of several tables is one change a table, each with a cursor of its own.
        row, nth = wire.rows()
        lsn, idx = cursors.lsn[row], cursors.idx[row] + nth
        relation = wire.relation(row, nth)
        schema_id, hidden, schemas = self._schemas_of(wire, row, relation, cursors.xid[row])
        hidden |= self._heartbeats(wire)[row]
        keep = ~hidden & at_or_above(self.resume, lsn, idx)
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
                pa.array(schema_id[keep]),
                wire.payload(row, nth),
            ],
            schema=RAW_SCHEMA,
        )
        return sealed_of(raw, schemas, heard.runs(row), heard.refusals(row, lsn, idx))

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
        cursors = _Cursors(tx_lsn[tx], before - tx_start[tx], tx_ts[tx], tx_xid[tx])
        cursors.lsn[loose], cursors.commit_ts[loose] = wire.loose(loose)
        cursors.idx[loose] = 0
        cursors.xid[loose] = 0

        ends = np.flatnonzero(is_begin | (wire.kind == COMMIT))
        self._open = _Open(
            int(tx_lsn[-1]),
            int(tx_ts[-1]),
            int(tx_xid[-1]),
            int(weight.sum() - tx_start[-1]),
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

    def _schemas_of(
        self, wire: Wire, row: Ints, relation: Ints, xid: Ints
    ) -> tuple[npt.NDArray[np.uint64], Mask, dict[int, bytes]]:
        """For each row the schema in force when it was sent, and which rows are our own tables'."""
        schema_id = np.zeros(len(row), dtype=np.uint64)
        own = np.zeros(len(row), dtype=bool)
        schemas: dict[int, bytes] = {}
        for known, rows in self.relations.in_force(wire, row, relation, self.received, self.codec):
            if known.own:
                own[rows] = True
                continue
            schema = known.schema(self.catalog_of, int(xid[rows[0]]))
            schema_id[rows] = schema.schema_id
            schemas[schema.schema_id] = schema.message
        return schema_id, own, schemas


def at_or_above(resume: Cursor, lsn: Ints, idx: Ints) -> Mask:
    """Which cursors are not below ``resume``."""
    found: Mask = (lsn > resume.lsn) | ((lsn == resume.lsn) & (idx >= resume.idx))
    return found


def sealed_of(
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    annotations: Sequence[Run],
    refused: Sequence[Refused],
) -> Sealed:
    """A batch of RAW_SCHEMA with its bounds, and of ``schemas`` those that its rows need."""
    used = set(np.unique(raw.column("schema_id").to_numpy()).tolist())
    lsn, idx = raw.column("commit_lsn"), raw.column("commit_idx")
    return Sealed(
        raw,
        {key: message for key, message in schemas.items() if key in used},
        Cursor(lsn[0].as_py(), idx[0].as_py()),
        Cursor(lsn[-1].as_py(), idx[-1].as_py() + 1),
        annotations,
        refused,
    )


@dataclass(frozen=True)
class _Cursors:
    lsn: Ints
    idx: Ints
    commit_ts: Ints
    xid: Ints
