"""Any destination behind a ledger: what it already has is left out before it is asked.

Invariants: a message that the ledger has is not sent; one that it has not is; and what
was accepted is noted while other requests go on, within a bound: a crash repeats the requests that
were under way, and those that were accepted and not noted yet (``Notes``). Whatever a delivery
counts is noted when it returns. A ledger in the state database is waited for. Without one in Redis
delivery goes on as if it were empty, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.change import MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError
from cdc.queue.ledger.base import Integers, Ledger, LedgerUse, among
from cdc.queue.ledger.open import LedgerAddress
from sinks.base import Delivery, RequestSink
from sinks.notes import Notes

NOTED_MESSAGES: Final = 16
"""So many accepted messages per connection may wait for their note, or one request if it has more.
"""


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
        return self.deliver_parts([batch])[0]

    def deliver_parts(self, parts: Sequence[MessageBatch]) -> list[Delivery]:
        """The same of several batches side by side; the first tells how the ledger did."""
        try:
            known, lost = self._known(parts)
        except TransientError as error:
            return [Delivery(0, error=error)] * len(parts)
        missing = [np.flatnonzero(~mask) for mask in known]
        to_send = [at for at, places in enumerate(missing) if len(places)]
        note = partial(self._ledger.note, self._name, queued=self._queued)
        per_request = max(self._sink.messages_per_request, NOTED_MESSAGES)
        notes = Notes(note, len(parts) * per_request, needed=self._ledger.with_state)
        results = [Delivery(0)] * len(parts)
        if to_send:
            chosen = [_chosen(parts[at], missing[at]) for at in to_send]
            for at, result in zip(to_send, self._sink.deliver_parts(chosen, notes), strict=True):
                results[at] = replace(result, error=result.error or notes.error)
        use = LedgerUse(notes.use.lost or lost, notes.use.unnoted)
        if use.lost is None and to_send:
            use = self._trimmed()
        whole = [_of_the_whole(*each) for each in zip(results, known, missing, strict=True)]
        uses = [use, *[LedgerUse()] * (len(parts) - 1)]
        return [replace(one, ledger=each) for one, each in zip(whole, uses, strict=True)]

    def close(self) -> None:
        """Sink and ledger are closed by those who opened them; others may use them."""

    def _known(
        self, parts: Sequence[MessageBatch]
    ) -> tuple[list[npt.NDArray[np.bool_]], str | None]:
        """For each message whether the ledger has it, and why it could not be asked.

        Raises TransientError if delivery cannot go on without.
        """
        first, last = min(part.cursor(0) for part in parts), max(part.cursor(-1) for part in parts)
        noted, lost = b"", None
        try:
            noted = self._ledger.seen(self._name, first, last, queued=self._queued)
        except TransientError as error:
            if self._ledger.with_state:
                raise
            lost = error.what
        return [among(*_cursors(part), noted) for part in parts], lost

    def _trimmed(self) -> LedgerUse:
        """Let the ledger forget what is settled."""
        if self._ledger.with_state or self._settled == ORIGIN:
            return LedgerUse()
        try:
            self._ledger.trim(self._name, self._settled)
        except TransientError as error:
            return LedgerUse(error.what)
        return LedgerUse()


def _of_the_whole(
    result: Delivery, known: npt.NDArray[np.bool_], missing: npt.NDArray[np.int64]
) -> Delivery:
    """What the delivery of the missing messages means for all of them.

    What the ledger has behind the first that is not safe must wait for it all the same.
    """
    all_of_it = result.settled == len(missing)
    settled = len(known) if all_of_it else int(missing[result.settled])
    absorbed = int(np.count_nonzero(known[:settled])) + result.absorbed
    return Delivery(settled, absorbed, result.error)


def _cursors(batch: MessageBatch) -> tuple[Integers, Integers]:
    return (
        batch.rows.column("commit_lsn").to_numpy(),
        batch.rows.column("commit_idx").to_numpy(),
    )


def _chosen(batch: MessageBatch, positions: npt.NDArray[np.int64]) -> MessageBatch:
    if len(positions) == len(batch):
        return batch
    return MessageBatch(batch.rows.take(pa.array(positions)), batch.shape)
