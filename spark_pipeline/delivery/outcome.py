"""What a share came to: how far its consumer got, and what became of the rest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.cursor_columns import in_cursor_order
from cdc.errors import WalbrookError
from cdc.queue.ledger.base import LedgerUse
from cdc.queue.ledger.base import together as all_uses
from sinks.base import StoppedTable


@dataclass(frozen=True)
class Poison:
    """A message that cannot be delivered whatever is tried, and why.

    The error may quote the message: it is for ``walbrook.dead_letters`` alone.
    """

    cursor: Cursor
    error: str


@dataclass(frozen=True)
class Outcome:
    """How far a consumer got: everything below ``cursor`` is settled."""

    consumer: str
    cursor: Cursor
    delivered: int = 0
    absorbed: int = 0
    last_commit: datetime | None = None
    error: WalbrookError | None = None  # why it failed
    more: bool = False  # it ended early, and did not fail: what follows comes next
    dead: tuple[Poison, ...] = ()  # below ``cursor``; the consumer goes on without them
    queued: pa.RecordBatch | None = None  # EVENT_SCHEMA, below ``cursor``: for its queue
    refusals: int = 0  # refusals in a row at its end
    ledger: LedgerUse | None = None  # how its ledger did, if it was asked
    top_before: Cursor | None = None  # the destination's last message before it (Delivery.top)
    top: Cursor | None = None  # the last message that the destination has of it
    stopped: tuple[StoppedTable, ...] | None = None  # as its sink said last, if it said so

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of the share is settled."""
        return self.error is None and not self.more

    @property
    def has_dead(self) -> bool:
        """Whether settling it makes dead letters."""
        buried = self.queued is not None and bool(self.queued.column("dead").true_count)
        return bool(self.dead) or buried

    def after(self, done: Outcome) -> Outcome:
        """What both came to, where this one followed ``done``."""
        return replace(
            self,
            delivered=done.delivered + self.delivered,
            absorbed=done.absorbed + self.absorbed,
            last_commit=self.last_commit or done.last_commit,
            dead=done.dead + self.dead,
            queued=together([done.queued, self.queued]),
            ledger=all_uses((done.ledger, self.ledger)),
            top_before=done.top_before or self.top_before,
            top=self.top or done.top,
            stopped=done.stopped if self.stopped is None else self.stopped,
        )

    def cut(self, at: Cursor) -> Outcome:
        """As if it had stopped at a cursor: what was queued from there on comes again."""
        if self.queued is None:
            return replace(self, cursor=at)
        return replace(self, cursor=at, queued=below(self.queued, at))


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """What the parts of one consumer's changes came to, at least one of them.

    A consumer has settled what all of its parts have. Beyond the lowest cursor some have delivered
    more, which comes again: that is the price of going in parallel, paid only after a failure.
    """
    if len(outcomes) == 1:
        return outcomes[0]
    lowest = min(outcomes, key=lambda outcome: outcome.cursor)
    stopped = sorted(
        (outcome for outcome in outcomes if not outcome.is_whole),
        key=lambda outcome: (not outcome.failed, outcome.cursor),
    )
    failed = stopped[0].error if stopped else None
    commits = [outcome.last_commit for outcome in outcomes if outcome.last_commit is not None]
    return Outcome(
        lowest.consumer,
        lowest.cursor,
        sum(outcome.delivered for outcome in outcomes),
        sum(outcome.absorbed for outcome in outcomes),
        (lowest.last_commit if stopped else max(commits, default=None)),
        failed,
        more=bool(stopped) and failed is None,
        queued=_in_cursor_order(
            together([outcome.cut(lowest.cursor).queued for outcome in outcomes])
        ),
        ledger=all_uses(outcome.ledger for outcome in outcomes),
    )


def together(pieces: Sequence[pa.RecordBatch | None]) -> pa.RecordBatch | None:
    """Rows queued at different times as one batch; None without any."""
    some = [piece for piece in pieces if piece is not None and piece.num_rows]
    return pa.concat_batches(some) if len(some) > 1 else next(iter(some), None)


def _in_cursor_order(rows: pa.RecordBatch | None) -> pa.RecordBatch | None:
    return None if rows is None else in_cursor_order(rows)


def below(rows: pa.RecordBatch, cursor: Cursor) -> pa.RecordBatch:
    """The rows that stand below a cursor."""
    return rows.filter(pa.array(is_below(rows, cursor)))


def is_below(rows: pa.RecordBatch, cursor: Cursor) -> npt.NDArray[np.bool_]:
    """For each row whether it stands below a cursor."""
    lsn, idx = (rows.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
    found: npt.NDArray[np.bool_] = (lsn < cursor.lsn) | ((lsn == cursor.lsn) & (idx < cursor.idx))
    return found
