"""The dead letters of a delivery: found again while they are settled, in the log or in a piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from cdc.log.open import open_log
from cdc.state.dead_letters import DeadLetter
from spark_pipeline.backfill.piece import Piece
from spark_pipeline.delivery.dead_letters import FrameSource, dead_letters, poisoned
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.feed.decoded_range import DecodedRange


class UnreadDeadLetters:
    """Those of one delivery; they are read when they are iterated over."""

    def __init__(
        self, decoded: DecodedRange | Piece, share: Share, outcome: Outcome, log_directory: Path
    ) -> None:
        self._decoded, self._share, self._outcome = decoded, share, outcome
        self._log_directory = log_directory

    def __iter__(self) -> Iterator[DeadLetter]:
        if isinstance(self._decoded, Piece):
            yield from self._found_in(self._decoded.log())
            return
        with closing(open_log(self._log_directory, history=self._decoded.history)) as log:
            yield from self._found_in(log)

    def _found_in(self, frames: FrameSource) -> Iterator[DeadLetter]:
        changes_of = self._decoded.plan.changes
        yield from dead_letters(self._share, self._outcome.cursor, frames, changes_of)
        yield from poisoned(self._outcome.dead, frames)
