"""Any destination behind a ledger: what it already has is left out before it is asked.

What must always hold: a message that the ledger has is not sent; one that it has not is; and each
request is noted when it was accepted, before the next is sent, so that one request at most is
repeated after a crash. A ledger in the state database is waited for. Without one in Redis delivery
goes on as if it were empty, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.change import MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError
from cdc.queue.ledger import Integers, Ledger, LedgerUse, among
from cdc.queue.open_ledger import LedgerAddress
from sinks.base import Delivery, RequestSink


@dataclass(frozen=True)
class LedgerPlace:
    """A consumer's ledger: where it is, its name there, and what it need not hold any more."""

    address: LedgerAddress
    ledger: str
    settled: Cursor = ORIGIN  # below it everything is settled
    queued: bool = False  # for messages of the consumer's queue


class LedgeredSink:
    """A sink and a ledger as one sink, for the deliveries from one place of the consumer."""

    def __init__(self, sink: RequestSink, ledger: Ledger, place: LedgerPlace) -> None:
        self._sink = sink
        self._ledger = ledger
        self._name, self._settled, self._queued = place.ledger, place.settled, place.queued

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Send what the ledger has not; positions and counts are those of the whole batch."""
        followed = _Followed(self._ledger, self._name, self._queued)
        try:
            known = followed.known(batch)
        except TransientError as error:
            return Delivery(0, error=error)
        missing = np.flatnonzero(~known)
        if not len(missing):
            return Delivery(len(batch), absorbed=len(batch), ledger=followed.use)
        rest = batch if len(missing) == len(batch) else _chosen(batch, missing)
        result = self._sink.deliver(rest, followed.accepted)
        self._trim(followed)
        # What the ledger has behind the first that is not safe must wait for it all the same.
        all_of_it = result.settled == len(missing)
        settled = len(batch) if all_of_it else int(missing[result.settled])
        absorbed = int(np.count_nonzero(known[:settled])) + result.absorbed
        return Delivery(settled, absorbed, result.error, followed.use)

    def close(self) -> None:
        """Sink and ledger are closed by those who opened them; others may use them."""

    def _trim(self, followed: _Followed) -> None:
        if self._ledger.with_state or self._settled == ORIGIN or followed.use.lost is not None:
            return
        try:
            self._ledger.trim(self._name, self._settled)
        except TransientError as error:
            followed.use = LedgerUse(error.what, followed.use.unnoted)


class _Followed:
    """One delivery as its ledger sees it."""

    def __init__(self, ledger: Ledger, name: str, queued: bool) -> None:
        self._ledger = ledger
        self._name = name
        self._queued = queued
        self.use = LedgerUse()

    def known(self, batch: MessageBatch) -> npt.NDArray[np.bool_]:
        """For each message whether the ledger has it; raises if that cannot be done without."""
        lsn, idx = _cursors(batch)
        first, last = batch.cursor(0), batch.cursor(-1)
        try:
            noted = self._ledger.seen(self._name, first, last, queued=self._queued)
        except TransientError as error:
            if self._ledger.with_state:
                raise
            self.use = LedgerUse(error.what)
            noted = b""
        return among(lsn, idx, noted)

    def accepted(self, lsn: Integers, idx: Integers) -> TransientError | None:
        """Note a request; without a ledger that can be reached, that it was not noted."""
        try:
            self._ledger.note(self._name, lsn, idx, queued=self._queued)
        except TransientError as error:
            if self._ledger.with_state:
                return error
            self.use = LedgerUse(error.what, self.use.unnoted + len(lsn))
        return None


def _cursors(batch: MessageBatch) -> tuple[Integers, Integers]:
    return (
        batch.rows.column("commit_lsn").to_numpy(),
        batch.rows.column("commit_idx").to_numpy(),
    )


def _chosen(batch: MessageBatch, positions: npt.NDArray[np.int64]) -> MessageBatch:
    return MessageBatch(batch.rows.take(pa.array(positions)), batch.shape)
