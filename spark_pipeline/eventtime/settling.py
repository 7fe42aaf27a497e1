"""Settling for consumers in event-time order: one transaction for all their databases.

What must always hold: the cursor of each database, what was released, what waits and what is dead
become true together; a cursor that somebody else moved stops all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa

from cdc.connection import Connection
from cdc.cursor import Cursor, format_lsn
from cdc.state.dead_letters import DeadLetter
from cdc.state.event_time import Numbering, SourceStanding, fence, note_released
from cdc.state.gaps import Gap, gap_told
from cdc.state.ledgers import TRIM
from cdc.state.positions import Settlement, settle


@dataclass
class Share:
    """What is to be settled of one database."""

    cursor: Cursor
    read: Cursor
    delivered: int = 0
    absorbed: int = 0
    last_commit: datetime | None = None
    dead: Iterable[DeadLetter] = ()
    aside: pa.RecordBatch | None = None


@dataclass(frozen=True)
class Reached:
    """Where a consumer stands once it is settled."""

    numbering: Numbering
    watermark: int | None
    shares: dict[str, Share]
    gaps: Sequence[tuple[str, Gap]] = field(default=())  # that were told, by database


class EventSettler:
    """Settles for one consumer, under the terms of its databases."""

    def __init__(self, consumer: str, terms: Mapping[str, int]) -> None:
        self._consumer = consumer
        self._terms = terms

    def settle(
        self,
        state: Connection,
        standing: Mapping[str, SourceStanding],
        reached: Reached,
        *,
        ledger: str | None,
    ) -> None:
        """One transaction; ``ledger`` is the name of the consumer's, if it lies in Postgres."""
        with state.transaction():
            fence(state, self._terms)
            for source in sorted(reached.shares):
                share = reached.shares[source]
                settle(
                    state,
                    source=source,
                    term=self._terms[source],
                    read_to=share.read,
                    consumers={self._consumer: self._settlement(standing[source], share)},
                )
            note_released(
                state,
                self._consumer,
                numbering=reached.numbering,
                watermark=reached.watermark,
                sources=standing,
                reads={source: share.read for source, share in reached.shares.items()},
            )
            for source, gap in reached.gaps:
                gap_told(state, gap, self._terms[source])
            if ledger is not None:
                lsn, idx = reached.numbering.place(0)
                state.execute(TRIM, {"ledger": ledger, "lsn": format_lsn(lsn), "idx": idx})

    def _settlement(self, standing: SourceStanding, share: Share) -> Settlement:
        return Settlement(
            since=standing.cursor,
            cursor=share.cursor,
            delivered=share.delivered,
            absorbed=share.absorbed,
            last_commit=share.last_commit,
            dead=share.dead,
            aside=share.aside,
        )
