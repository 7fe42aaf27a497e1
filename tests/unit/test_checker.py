"""A checker counts only if it catches sabotage."""

from __future__ import annotations

import pytest

from tests.checker import Arrival, compare, digest


def arrival(key: int, n: int, payload: str = "p") -> Arrival:
    return Arrival(key, n, payload, digest(key, n, payload))


SENT = [arrival(1, 1), arrival(2, 1), arrival(1, 2), arrival(2, 2), arrival(1, 3)]
LEDGER = {(a.key, a.n): a.digest for a in SENT}


def test_rows_that_arrived_in_order_are_clean() -> None:
    findings = compare(LEDGER, SENT)
    assert not findings
    assert (findings.written, findings.duplicates) == (5, 0)


@pytest.mark.parametrize(
    ("arrived", "field", "found"),
    [
        (SENT[:2] + SENT[3:], "lost", [(1, 2)]),
        ([*SENT, arrival(3, 1)], "phantom", [(3, 1)]),
        ([*SENT[:4], Arrival(1, 3, "other", SENT[4].digest)], "corrupt", [(1, 3)]),
        ([SENT[0], SENT[1], SENT[4], SENT[2], SENT[3]], "reordered", [(1, 2)]),
    ],
)
def test_sabotage_is_caught(arrived: list[Arrival], field: str, found: list[object]) -> None:
    findings = compare(LEDGER, arrived)
    assert findings
    assert getattr(findings, field) == found


def test_a_repeat_is_a_duplicate_and_no_reordering() -> None:
    findings = compare(LEDGER, [*SENT, SENT[0], SENT[2]])
    assert not findings
    assert findings.duplicates == 2
