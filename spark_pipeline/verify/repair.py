"""Repair: the rows that differ are delivered again, by a backfill of these rows alone.

Rows that the source has are read again by key and delivered as ``read``. Rows that the destination
alone has are looked for once more, as the repair of a source does, and delivered as ``delete``.
Afterwards the same rows are compared once more.
"""

from __future__ import annotations

import time
from typing import Final

from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.state.verifications import ComparisonResult, VerificationRow, backfill_state
from cdc.verify.held import key_of, key_text
from spark_pipeline.verify.comparison import TableComparison

_PATIENCE_S: Final = 3_600.0
_LOOK_S: Final = 0.5


def repair(
    comparison: TableComparison,
    state: Connection,
    row: VerificationRow,
    consumer: str,
    table: TableName,
    found: ComparisonResult,
) -> None:
    """Deliver what differs again, and record what is equal then."""
    deadline = time.monotonic() + _PATIENCE_S
    lacking = [key for key, difference in found.differences.items() if difference != "extra"]
    deletes = len(lacking) < len(found.differences)
    while (
        backfill := row.start_repair(consumer, table, comparison.oid, lacking, deletes=deletes)
    ) is None:
        _wait(comparison, row, deadline, f"another backfill of {table} is under way")
    while True:
        now, why = backfill_state(state, backfill)
        if now == "done":
            break
        if now in ("failed", "cancelled", "skipped"):
            raise OperatorError(
                f"backfill {backfill}, which was to repair {table}, is {now}: {why or 'by hand'}",
                fix="mend what the backfill says, and verify again",
                kind="repair_failed",
            )
        _wait(comparison, row, deadline, why)
    rounds = comparison.look_again([*map(key_of, found.differences)], "repairing")
    left = [*map(key_text, [*rounds.differing, *rounds.open])]
    row.finish(repaired=len(found.differences) - len(left), left=left)


def _wait(
    comparison: TableComparison, row: VerificationRow, deadline: float, reason: str | None
) -> None:
    if time.monotonic() > deadline:
        raise OperatorError(
            f"the repair takes longer than {_PATIENCE_S:.0f} s",
            fix="walbrook.backfill_progress says what it waits for; verify again afterwards",
            kind="repair_slow",
        )
    row.advance("repairing", reason=reason)
    comparison.pause(_LOOK_S)
