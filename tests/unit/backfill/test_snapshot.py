"""Which transactions a snapshot contains, against a model that looks at one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.backfill.snapshot import Snapshot
from cdc.errors import ProtocolError

_ROUND = 1 << 32


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    xmin = draw(st.integers(3, 1 << 40))
    xmax = xmin + draw(st.integers(0, 1000))
    if xmax == xmin:
        return Snapshot(xmin, xmax)
    listed = draw(st.sets(st.integers(xmin, xmax - 1), max_size=10))
    return Snapshot(xmin, xmax, tuple(sorted(listed)))


def _model(snapshot: Snapshot, xid: int) -> bool:
    """One transaction with all its bits, as Postgres says it."""
    if xid >= snapshot.xmax:
        return False
    return xid not in snapshot.in_progress


@given(snapshots(), st.lists(st.integers(-(1 << 31) + 1, (1 << 31) - 1), max_size=50))
def test_transactions_are_seen_as_the_model_sees_them(snapshot: Snapshot, away: list[int]) -> None:
    whole = [snapshot.xmax + each for each in away if snapshot.xmax + each > 0]
    written = np.array([xid % _ROUND for xid in whole], np.int64)
    assert snapshot.whole(written).tolist() == whole
    assert snapshot.contains(written).tolist() == [_model(snapshot, xid) for xid in whole]


def test_a_transaction_before_the_wraparound_is_seen_behind_it() -> None:
    snapshot = Snapshot.parse(f"{_ROUND + 5}:{_ROUND + 9}:{_ROUND + 5},{_ROUND + 7}")
    xids = np.array([_ROUND - 1, 4, 5, 6, 7, 8, 9], np.int64)
    assert snapshot.contains(xids).tolist() == [True, True, False, True, False, True, False]


def test_a_snapshot_of_a_standby_contains_what_had_ended_for_certain() -> None:
    snapshot = Snapshot.parse("756:759:").of_standby
    xids = np.array([755, 756, 758, 759], np.int64)
    assert snapshot.contains(xids).tolist() == [True, False, False, False]


def test_a_snapshot_is_read_as_it_is_written() -> None:
    for text in ("726:726:", "10:20:10,14,15"):
        assert str(Snapshot.parse(text)) == text
    # The commit that hangs in synchronous replication is not listed: it is the newest.
    assert not Snapshot.parse("726:726:").contains(np.array([726], np.int64))[0]
    with pytest.raises(ProtocolError, match="not a snapshot"):
        Snapshot.parse("726")
