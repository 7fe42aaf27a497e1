"""Messages in, batches for the log out, in commit order: whole transactions and those in pieces.

A transaction that is sent before it ends waits in the spill and is published at its commit, with
the cursors it would have had if it had come whole. Invariant: a replay may come either
way, and gives the same batches' worth of rows under the same cursors. So only rows that survive are
counted, those of subtransactions that were rolled back are not.

How the reader uses it, with one ``Spill`` for its lifetime and one ``TransactionAssembler`` per
connection::

    start = spill.start(resume.lsn, confirmed_lsn, two_phase=…)
    intake = Intake(Sealer(resume, control.catalog_of), spill, BatchLimits(rows, bytes))
    for sealed in intake.take(messages):      # to the end, or give up the connection
        log.append(…)                         # a large transaction is many batches:
                                              # send feedback between them when it is due
    spill.settled(kept)                       # before each feedback
    confirm(spill.secure(safe_lsn, end_lsn))

``intake.in_transaction`` keeps an idle position from moving; transactions that wait in the spill
need not, because their commit lies beyond every position that the server has named so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import ProtocolError
from cdc.replication.spill.spill import NotStreamableError, Spill, UnendedTransaction
from cdc.replication.spill.spill_file import SPILL_SCHEMA, SpilledRows
from cdc.replication.spill.spilled_transaction import BatchLimits, Publisher, StreamedCommit
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from cdc.replication.wire.stream_blocks import (
    WITH_XID,
    Block,
    Blocks,
    End,
    Prepared,
    PreparedCommitted,
    PreparedRolledBack,
    StreamCommitted,
    aborts_of,
    ends_of,
    find_blocks,
)
from cdc.replication.wire.wire import CONTROLS, MESSAGE, Ints, Wire

_DEFAULTS: Final = BatchLimits()
_FIX: Final = "reconnect; if it stays, set stream_transactions to false and report it"


class TransactionAssembler:
    """What one connection sends, as batches for the log."""

    def __init__(
        self,
        sealer: Sealer,
        spill: Spill,
        limits: BatchLimits = _DEFAULTS,
        *,
        settled: Cursor = ORIGIN,
        skipped: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing below ``settled`` is needed any more.

        ``skipped`` is called for each piece of a spilled transaction that is not for the log: going
        past gigabytes of them takes minutes.
        """
        self._sealer = sealer
        self._spill = spill
        self._limits = limits
        self._settled = settled
        self._skipped = skipped
        self._block: Block | None = None
        spill.forget_waiting()

    @property
    def in_transaction(self) -> bool:
        """Whether the messages so far end inside a transaction, or inside a block of one."""
        return self._sealer.in_transaction or self._block is not None

    @property
    def heartbeats(self) -> list[bytes]:
        """The contents of all heartbeats among the messages taken last."""
        return self._sealer.heartbeats

    def take(self, messages: Sequence[bytes]) -> Iterator[Sealed]:
        """The batches that ``messages`` complete, bounded, in cursor order."""
        few = self._sealer.seal_few(messages) if self._block is None else None
        if few is not None:
            yield few
            return
        wire = Wire.join(messages)
        self._sealer.heartbeats = []
        for sealed in self._taken(wire):
            yield from sealed.parts()
        self._sealer.received += len(wire)

    def _taken(self, wire: Wire) -> Iterator[Sealed]:
        if self._block is None and not CONTROLS[wire.kind].any():
            sealed = self._sealer.seal_wire(wire)
            if sealed is not None:
                yield sealed
        else:
            yield from self._in_pieces(wire)

    def _in_pieces(self, wire: Wire) -> Iterator[Sealed]:
        blocks = find_blocks(wire, self._block, self._sealer.in_transaction)
        carrying = np.flatnonzero(blocks.streamed & WITH_XID[wire.kind])
        subxid = blocks.owner.copy()
        wire, subxid[carrying] = wire.without_xid(carrying)
        start = 0
        for at, end in [*ends_of(wire), (len(wire), None)]:
            span = np.arange(start, at)
            yield from self._whole(wire, span[blocks.owner[start:at] == 0])
            self._put_aside(wire, blocks, subxid, start, at)
            self._leave_out_aborted(wire, start, at)
            if end is not None:
                yield from self._ended(end)
            start = at + 1
        self._block = blocks.left_open

    def _whole(self, wire: Wire, outside: Ints) -> Iterator[Sealed]:
        """Transactions that came whole, between the others."""
        plain = outside[~CONTROLS[wire.kind[outside]]]
        if len(plain):
            sealed = self._sealer.seal_wire(wire.select(plain))
            if sealed is not None:
                yield sealed

    def _put_aside(self, wire: Wire, blocks: Blocks, subxid: Ints, start: int, end: int) -> None:
        """The rows of each transaction whose blocks lie between two positions, in one go.

        Blocks of one transaction may be joined over those of others: they meet only at an end.
        """
        for at, block in blocks.opened.items():
            if start <= at < end:
                self._open(block)
        owner = blocks.owner[start:end]
        for xid in np.unique(owner[owner != 0]).tolist():
            waiting = self._spill.waiting(xid)
            if waiting is None:
                raise ProtocolError(f"transaction {xid} goes on without having begun", fix=_FIX)
            chosen = start + np.flatnonzero(owner == xid)
            self._append(waiting, wire.select(chosen), subxid[chosen])

    def _open(self, block: Block) -> None:
        known = self._spill.waiting(block.xid) is not None
        if known != block.continues:
            says = "goes on" if block.continues else "begins again"
            raise ProtocolError(f"the stream of transaction {block.xid} {says}", fix=_FIX)
        if not known:
            self._spill.wait(block.xid, streamed=block.streamed)

    def _append(self, waiting: UnendedTransaction, wire: Wire, subxid: Ints) -> None:
        row, nth = wire.rows()
        relation = wire.relation(row, nth)
        if len(wire.outside_transactions()):
            raise ProtocolError("a message outside transactions stands inside one", fix=_FIX)
        schema_id = np.zeros(len(row), dtype=np.uint64)
        hidden = np.isin(row, wire.heartbeats())
        schemas: dict[int, bytes] = {}
        # What a stream announces is its own until its commit; other blocks tell the connection.
        relations = waiting.relations if waiting.streamed else self._sealer.relations
        for known, rows in relations.in_force(
            wire, row, relation, self._sealer.received, self._sealer.codec
        ):
            schema = known.bare
            schema_id[rows] = schema.schema_id
            hidden[rows] = known.own
            schemas[schema.schema_id] = schema.message
        if not len(row):
            return
        waiting.has_messages |= bool((wire.kind[row] == MESSAGE).any())
        rows_of_schema = [
            pa.array(subxid[row]),
            pa.array(hidden),
            pa.array(wire.kind[row]),
            pa.array(relation.astype(np.uint32)),
            pa.array(schema_id),
            wire.payload(row, nth),
        ]
        batch = pa.RecordBatch.from_arrays(rows_of_schema, schema=SPILL_SCHEMA)
        self._spill.append(waiting, batch, schemas)

    def _leave_out_aborted(self, wire: Wire, start: int, end: int) -> None:
        for at, xid, subxid in aborts_of(wire, start, end):
            waiting = self._spill.waiting(xid)
            if waiting is None:
                continue
            if subxid == xid:
                self._spill.drop(waiting)
                continue
            if waiting.has_messages:
                raise NotStreamableError(
                    f"transaction {xid} rolled back a savepoint and emitted logical messages, "
                    "which do not say whether they were rolled back with it",
                    fix="it is read at its commit instead",
                    kind="message_in_doubt",
                )
            waiting.aborted.add(subxid)
            waiting.aborted_at = self._sealer.received + int(wire.place[at])

    def _ended(self, end: End) -> Iterator[Sealed]:
        if isinstance(end, StreamCommitted):
            yield from self._stream_committed(end)
        elif isinstance(end, Prepared):
            self._spill.prepare(self._known(end.xid))
        elif isinstance(end, PreparedCommitted):
            yield from self._prepared_committed(end)
        elif isinstance(end, PreparedRolledBack):
            self._spill.drop_prepared(end.xid)

    def _stream_committed(self, end: StreamCommitted) -> Iterator[Sealed]:
        waiting = self._known(end.xid)
        outcome = StreamedCommit(end.xid, end.commit_lsn, end.commit_ts, frozenset(waiting.aborted))
        yield from self._publish(outcome, waiting.file.frames())
        self._sealer.relations.adopt(waiting.relations, since=waiting.aborted_at)
        self._spill.drop(waiting)

    def _prepared_committed(self, end: PreparedCommitted) -> Iterator[Sealed]:
        if end.commit_lsn < self._settled.lsn:
            self._spill.drop_prepared(end.xid)  # delivered to everyone, or given up
            return
        found = self._spill.prepared(end.xid)
        if found is None:
            if end.commit_lsn < self._sealer.resume.lsn:
                return  # published before this connection
            raise self._spill.missing(end.gid, end.commit_lsn)
        aborted, frames = found
        # Rows below ``resume`` are in the log already, but it may not keep them yet.
        published = max(Cursor(end.commit_lsn, 0), self._sealer.resume)
        outcome = StreamedCommit(end.xid, end.commit_lsn, end.commit_ts, aborted)
        for sealed in self._publish(outcome, frames):
            published = sealed.high
            yield sealed
        self._spill.published(end.xid, published)

    def _publish(self, outcome: StreamedCommit, frames: Iterable[SpilledRows]) -> Iterator[Sealed]:
        sealer = self._sealer
        publisher = Publisher(
            outcome, sealer.resume, sealer.catalog_of, self._skipped, sealer.versions
        )
        yield from publisher.batches(frames, self._limits)

    def _known(self, xid: int) -> UnendedTransaction:
        waiting = self._spill.waiting(xid)
        if waiting is None:
            raise ProtocolError(f"transaction {xid} ends without having begun", fix=_FIX)
        return waiting
