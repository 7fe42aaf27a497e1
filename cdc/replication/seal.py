"""Turning what came off the wire into a batch: cursors, kinds and schemas by column. No I/O.

The reader only collects XLogData messages; here NumPy works out for all of them at once which
transaction each belongs to and which number it has in it. What must always hold: the same WAL
gives the same cursors, however it is cut into batches, on whatever connection it comes. So only
what the transaction itself contains is counted: rows, truncated tables and logical messages, never
Relation or Type messages, which depend on the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from cdc.cursor import ORIGIN, Cursor
from cdc.decode.raw import RAW_SCHEMA
from cdc.decode.relation import Relation, parse_relation, with_key
from cdc.errors import ProtocolError
from cdc.replication.wire import BEGIN, COMMIT, RELATION, ROWS, TRUNCATE, Ints, Wire

OWN_SCHEMA = "walbrook"
"""Our own tables never enter the stream: settling a change would otherwise make a new one."""


@dataclass(frozen=True)
class Sealed:
    """A batch ready for the log."""

    raw: pa.RecordBatch
    schemas: Mapping[int, bytes]
    first: Cursor
    high: Cursor


@dataclass
class _Open:
    """The transaction that the last batch ended in, or the one it ended with."""

    lsn: int = 0
    commit_ts: int = 0
    xid: int = 0
    next_idx: int = 0
    in_progress: bool = False


@dataclass(frozen=True)
class _Schema:
    schema_id: int
    message: bytes
    own: bool


def _no_key(_relation: Relation) -> Sequence[str]:
    return ()


@dataclass
class Sealer:
    """Carries what one batch must know of those before it, for one connection."""

    resume: Cursor = ORIGIN  # what is below was taken by an earlier connection
    key_of: Callable[[Relation], Sequence[str]] = _no_key  # asks the source's catalog
    _open: _Open = field(default_factory=_Open)
    _relations: dict[int, _Schema] = field(default_factory=dict)

    @property
    def in_transaction(self) -> bool:
        return self._open.in_progress

    def seal(self, messages: Sequence[bytes]) -> Sealed | None:
        """One batch of all ``messages``; None when nothing of them is for the log."""
        wire = Wire(messages)
        cursors = self._number(wire)
        rows = np.flatnonzero(ROWS[wire.kind])
        # A truncate of several tables is one change a table, each with a cursor of its own.
        repeats = np.where(wire.kind[rows] == TRUNCATE, wire.truncated(rows), 1)
        row = np.repeat(rows, repeats)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        lsn, idx = cursors.lsn[row], cursors.idx[row] + nth
        relation = wire.relation(row, nth)
        schema_id, own, schemas = self._schemas_of(wire, row, relation)
        keep = ~own & (
            (lsn > self.resume.lsn) | ((lsn == self.resume.lsn) & (idx >= self.resume.idx))
        )
        if not keep.any():
            return None
        row, lsn, idx = row[keep], lsn[keep], idx[keep]
        raw = pa.RecordBatch.from_arrays(
            [
                pa.array(lsn),
                pa.array(idx),
                pa.array(cursors.commit_ts[row]),
                pa.array(cursors.xid[row]),
                pa.array(wire.kind[row]),
                pa.array(relation[keep].astype(np.uint32)),
                pa.array(schema_id[keep]),
                wire.payload(row),
            ],
            schema=RAW_SCHEMA,
        )
        used = set(np.unique(schema_id[keep]).tolist())
        return Sealed(
            raw,
            {key: message for key, message in schemas.items() if key in used},
            Cursor(int(lsn[0]), int(idx[0])),
            Cursor(int(lsn[-1]), int(idx[-1]) + 1),
        )

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

    def _schemas_of(
        self, wire: Wire, row: Ints, relation: Ints
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_], dict[int, bytes]]:
        """For each row the schema in force when it was sent, and which rows are our own tables'."""
        schema_id = np.zeros(len(row), dtype=np.uint64)
        own = np.zeros(len(row), dtype=bool)
        schemas: dict[int, bytes] = {}
        announced = np.flatnonzero(wire.kind == RELATION)
        cuts = np.searchsorted(row, announced)
        for start, end, message in zip(
            [0, *cuts], [*cuts, len(row)], [None, *announced], strict=True
        ):
            if message is not None:
                self._announce(wire.message(int(message)))
            for oid in np.unique(relation[start:end]).tolist():
                if oid == 0:
                    continue
                schema = self._relations.get(oid)
                if schema is None:
                    raise ProtocolError(
                        f"a change names relation {oid}, which the server never described",
                        fix="reconnect; if it stays, report it with the server's version",
                    )
                of_oid = start + np.flatnonzero(relation[start:end] == oid)
                schema_id[of_oid] = schema.schema_id
                own[of_oid] = schema.own
                schemas[schema.schema_id] = schema.message
        return schema_id, own, schemas

    def _announce(self, message: bytes) -> None:
        relation = parse_relation(message)
        own = relation.namespace == OWN_SCHEMA
        schema = message if own else with_key(message, self.key_of(relation))
        self._relations[relation.oid] = _Schema(xxhash.xxh3_64_intdigest(schema), schema, own)


@dataclass(frozen=True)
class _Cursors:
    lsn: Ints
    idx: Ints
    commit_ts: Ints
    xid: Ints
