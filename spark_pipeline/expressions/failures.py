"""Finding the rows that an expression fails on, by halving.

An evaluation gives an answer for all rows or for none. Invariant: a row is called bad only if it
fails alone; the search is bounded, and beyond the bound nothing is said of any row: the consumer
waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.bisection import bisect
from cdc.errors import TransientError, WalbrookError

BAD_ROWS_MAX: Final = 100
"""How many bad rows of a batch are found one by one."""

_TEXT_MAX: Final = 500


class EvaluationError(WalbrookError):
    """An evaluator gave no answer; of one row alone, this is that row's fault."""


@dataclass
class BadRowSearch:
    """The bad rows of one batch so far, whatever tables and expressions they are of."""

    consumer: str
    found: int = field(default=0)

    def count(self, what: str, detail: str = "") -> None:
        self.found += 1
        if self.found > BAD_ROWS_MAX:
            raise TransientError(
                f"the expressions of consumer {self.consumer} fail on more than {BAD_ROWS_MAX} "
                f"changes of one batch; the last: {what}",
                detail=detail,
                fix="correct the expression so that it takes such rows, for example with "
                "try_divide or try_cast, and start again; nothing was skipped",
            )


def answers(
    rows: pa.RecordBatch,
    evaluate: Callable[[pa.RecordBatch], pa.RecordBatch],
    search: BadRowSearch,
) -> tuple[pa.RecordBatch | None, NDArray[np.int64], dict[int, str]]:
    """What ``evaluate`` says of the good rows, their places, and the errors of the bad ones."""
    said: list[pa.RecordBatch] = []
    good: list[NDArray[np.int64]] = []
    bad: dict[int, str] = {}

    def attempt(start: int, stop: int) -> pa.RecordBatch:
        return evaluate(rows.slice(start, stop - start))

    for start, stop, result in bisect(rows.num_rows, attempt, EvaluationError):
        if isinstance(result, EvaluationError):
            bad[start] = result.full_what[:_TEXT_MAX]
            search.count(result.what, result.detail)
        else:
            said.append(result)
            good.append(np.arange(start, stop))
    places = np.concatenate(good) if good else np.empty(0, np.int64)
    return (pa.concat_batches(said) if said else None), places, bad
