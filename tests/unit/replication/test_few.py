"""A few messages sealed one by one give the batch that whole columns give, or are left to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.catalog import CatalogNote
from cdc.replication.spill.spill import Spill
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from cdc.replication.wire.small_batch import MESSAGES_MAX
from cdc.replication.wire.table_versions import TableVersions
from tests import pgoutput
from tests.unit.replication.annotated import set_annotation
from tests.wire_messages import ITEM, OWN, PART, row, transaction, wire

WIDER = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])
USUAL = [
    row(),
    row(2),
    pgoutput.update(1, ["2"], key=["1"]),
    pgoutput.update(1, ["1"], old=["0"]),
    pgoutput.delete(2, key=["1"]),
]
UNUSUAL = [
    ITEM,
    WIDER,
    PART,
    pgoutput.truncate([1, 2]),
    set_annotation(b"1"),
    row(9),
    pgoutput.logical_message("walbrook.heartbeat", b"1"),
]


def sealer(resume: Cursor, *, versions: bool) -> Sealer:
    known = TableVersions() if versions else None
    return Sealer(resume, lambda *_: CatalogNote(key=("id",)), versions=known)


@given(
    bodies=st.lists(
        st.lists(st.sampled_from(USUAL * 4 + UNUSUAL), max_size=6), min_size=1, max_size=8
    ),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    resume=st.sampled_from([ORIGIN, Cursor(100, 1), Cursor(300, 0)]),
    versions=st.booleans(),
)
def test_whatever_comes_however_it_is_cut_the_batches_are_those_of_whole_columns(
    bodies: Sequence[Sequence[bytes]], cuts: Sequence[int], resume: Cursor, versions: bool
) -> None:
    messages = [ITEM, PART, OWN]
    for number, body in enumerate(bodies, start=1):
        messages += transaction(100 * number, *body)
    bounds = sorted({0, len(messages), *(cut for cut in cuts if cut < len(messages))})
    few, columns = (sealer(resume, versions=versions) for _ in range(2))
    for start, end in itertools.pairwise(bounds):
        sent = wire(*messages[start:end])
        assert_same(few.seal_few(sent) or few.seal(sent), columns.seal(sent))
        assert (few.in_transaction, few.received) == (columns.in_transaction, columns.received)
        assert few.heartbeats == columns.heartbeats


def assert_same(found: Sealed | None, expected: Sealed | None) -> None:
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.raw.equals(expected.raw, check_metadata=True)
        for name in ("schemas", "first", "high", "annotations", "refused", "versions"):
            assert getattr(found, name) == getattr(expected, name), name


def known(*more: bytes) -> Sealer:
    """One that knows a table, its row, and what the catalog says of it."""
    found = sealer(ORIGIN, versions=True)
    found.seal(wire(ITEM, PART, OWN, *transaction(100, row()), *more))
    return found


def test_usual_transactions_take_the_short_way() -> None:
    assert known().seal_few(wire(*transaction(200, row(), row()))) is not None


@pytest.mark.parametrize("message", UNUSUAL, ids=lambda message: chr(message[0]))
def test_unusual_messages_are_left_to_whole_columns_and_change_nothing(message: bytes) -> None:
    few, columns = known(), known()
    sent = wire(*transaction(200, row(), message, row()))
    assert few.seal_few(sent) is None
    assert_same(few.seal(sent), columns.seal(sent))


def test_many_messages_are_left_to_whole_columns() -> None:
    assert known().seal_few(wire(*transaction(200, *[row()] * MESSAGES_MAX))) is None


def test_a_row_outside_of_transactions_is_left_to_whole_columns() -> None:
    assert known().seal_few(wire(row())) is None


def test_a_table_that_was_never_described_is_left_to_whole_columns() -> None:
    assert known().seal_few(wire(*transaction(200, row(77)))) is None


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_message_that_is_cut_off_is_left_to_whole_columns(cut: int) -> None:
    begin, change, _commit = transaction(200, row())
    assert known().seal_few(wire(begin[:cut], change)) is None
    assert known().seal_few(wire(begin, change[: min(cut, 4)])) is None


def test_an_intake_takes_the_short_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = known()
    intake = TransactionAssembler(whole, Spill(tmp_path / "spill"))
    monkeypatch.setattr(whole, "seal_wire", None)
    (sealed,) = intake.take(wire(*transaction(200, row())))
    assert (sealed.first, sealed.high) == (Cursor(200, 0), Cursor(201, 0))
