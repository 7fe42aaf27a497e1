"""A mark of a reload as a worker delivers it: one message for its sink, at a place of its own.

It stands in for a piece of a chunk, so its place is recorded before it is sent, it is sent again at
the same place after a crash, and it is done in the transaction that settles the cursor behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from cdc.backfill.ranges import ReloadStep
from cdc.backfill.reload import ReloadMark, mark_change
from cdc.cursor import Cursor
from cdc.errors import OperatorError, WalbrookError
from cdc.state.backfill_chunks import Chunk, PieceDone
from sinks.base import Reloads
from spark_pipeline.delivery.deliver import Share, send, sink_of

_logger = structlog.get_logger("walbrook.backfill")


@dataclass(frozen=True)
class MarkPiece:
    """A mark at its place."""

    chunk: Chunk
    step: ReloadStep
    place: Cursor

    @property
    def high(self) -> Cursor:
        return Cursor(self.place.lsn, self.place.idx + 1)

    @property
    def done(self) -> PieceDone:
        return PieceDone(self.chunk.backfill, self.chunk.number, rows=1, dropped=0, merged=0)

    def tell(self, share: Share) -> WalbrookError | None:
        """Send the mark to its sink. Returns why that did not succeed.

        A TransientError is worth another try. Any other fails the backfill, and nothing else.
        """
        if not isinstance(sink_of(share), Reloads):
            return OperatorError(
                f"consumer {share.consumer.name} has no tables that could be reloaded",
                fix="cancel the backfill",
            )
        mark = ReloadMark(self.chunk.backfill, self.step, self.chunk.leaf)
        try:
            return send(share, mark_change(mark, self.place)).error
        except WalbrookError as error:
            return error
        except Exception as error:
            _logger.exception("backfill.mark_broke", consumer=share.consumer.name)
            return OperatorError(
                f"it broke: {type(error).__name__}",
                fix="cancel the backfill; report it with what the log says",
                kind="broke",
            )
