"""What a micro-batch came to, as rows: one transaction for all in time, one for each late.

What must always hold: a consumer's cursor moves only over what its sink said is safe or what is
recorded as dead in the same transaction; a cursor that somebody else moved is left where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.log.view import LogReader
from cdc.state.dead_letters import DeadLetter
from cdc.state.lanes import Step
from cdc.state.positions import MovedError, Settlement, settle
from spark_pipeline.dead import dead_letters, poisoned
from spark_pipeline.errands import Errand
from spark_pipeline.exchange import SliceMarker
from spark_pipeline.outcome import Outcome

OpenLog = Callable[[], LogReader]


@dataclass(frozen=True)
class _Dead:
    """What a consumer went on without; of most micro-batches nothing, and nothing is read."""

    errand: Errand
    outcome: Outcome
    open_log: OpenLog

    def __iter__(self) -> Iterator[DeadLetter]:
        errors = any(piece.errors for piece in self.errand.slices)
        failed = any(leg.share.failed for leg in self.errand.legs)
        if not self.outcome.dead and not errors and not failed:
            return
        with closing(self.open_log()) as log:
            for leg in self.errand.legs:
                yield from dead_letters(leg.share, self.outcome.cursor, log, leg.plan.changes)
            yield from poisoned(self.outcome.dead, log)


class Settler:
    """Settles for the consumers of one source, under one term of the service."""

    def __init__(self, source: str, term: int, open_log: OpenLog) -> None:
        self._source = source
        self._term = term
        self._open_log = open_log

    def settle(
        self,
        state: Connection,
        results: Mapping[str, tuple[Errand, Outcome]],
        *,
        read_to: Cursor,
        as_of: datetime,
        step: Step | None = None,
    ) -> list[str]:
        """One transaction; the answer are the consumers whose cursors somebody else moved."""
        consumers = {
            name: self._settlement(errand, outcome, as_of)
            for name, (errand, outcome) in results.items()
        }
        moved: list[str] = []
        while True:
            try:
                settle(
                    state,
                    source=self._source,
                    term=self._term,
                    read_to=read_to,
                    consumers=consumers,
                    step=step,
                )
                return moved
            except MovedError as error:
                moved.append(error.consumer)
                del consumers[error.consumer]

    def _settlement(self, errand: Errand, outcome: Outcome, as_of: datetime) -> Settlement:
        failed = outcome.failed
        return Settlement(
            since=errand.start,
            cursor=outcome.cursor,
            delivered=outcome.delivered,
            absorbed=outcome.absorbed,
            last_commit=outcome.last_commit if outcome.error is not None else as_of,
            error=str(outcome.error) if failed else None,
            dead=_Dead(errand, outcome, self._open_log),
            aside=outcome.aside,
            ledger=errand.ledger,
            top_before=outcome.top_before,
            top=outcome.top,
        )


def as_of(slices: Sequence[SliceMarker]) -> datetime:
    """Up to when a consumer has everything that was committed, once it has these slices."""
    committed_us = max((piece.commit_us for piece in slices), default=0)
    if not committed_us:  # only idle progress: nothing was committed for us until now
        return datetime.now(UTC)
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=committed_us)
