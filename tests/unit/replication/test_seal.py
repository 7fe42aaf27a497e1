"""Sealing: the same WAL gives the same cursors, however it is cut."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.cursor import Cursor
from cdc.errors import DecodeError, ProtocolError
from cdc.replication.protocol import POSTGRES_EPOCH_US
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from tests import pgoutput
from tests.unit.replication.annotated import carried, set_annotation
from tests.wire_messages import ITEM, OWN, PART, row, transaction, wire


def texts(*batches: Sealed | None) -> list[bytes | None]:
    return [text for batch in batches if batch is not None for text in carried(batch)]


def cursors(*batches: Sealed | None) -> list[tuple[int, int, str, int]]:
    return [
        (r["commit_lsn"], r["commit_idx"], chr(r["kind"]), r["relation"])
        for batch in batches
        if batch is not None
        for r in batch.raw.to_pylist()
    ]


def test_rows_are_numbered_from_zero_in_each_transaction() -> None:
    sealed = Sealer().seal(wire(ITEM, *transaction(100, row(), row()), *transaction(200, row())))
    assert sealed is not None
    assert cursors(sealed) == [(100, 0, "I", 1), (100, 1, "I", 1), (200, 0, "I", 1)]
    assert (sealed.first, sealed.high) == (Cursor(100, 0), Cursor(201, 0))
    first = sealed.raw.to_pylist()[0]
    assert (first["commit_ts"], first["xid"]) == (100_000, 101)
    assert first["payload"] == row()


def test_a_batch_reaches_beyond_a_whole_transaction_and_no_further() -> None:
    begin, *rest = transaction(200, row(), row())
    for messages, high in (
        ([*transaction(200, row())], Cursor(201, 0)),
        ([begin, *rest[:1]], Cursor(200, 1)),
        ([*transaction(200, row()), *transaction(400, row())[:2]], Cursor(400, 1)),
    ):
        sealed = Sealer().seal(wire(ITEM, *messages))
        assert sealed is not None
        assert sealed.high == high
    # The next commit may follow a message outside transactions at once.
    loose = pgoutput.logical_message("note", b"x", transactional=False, lsn=208)
    sealer = Sealer()
    sealed = sealer.seal(wire(ITEM, *transaction(200, row()), loose))
    assert sealed is not None
    assert sealed.high == Cursor(207, 1)
    after = sealer.seal(wire(*transaction(208, row())))
    assert after is not None
    assert after.first >= sealed.high


def test_relation_type_and_origin_messages_take_no_number() -> None:
    chatter = [ITEM, b"Y" + bytes(10), b"O" + bytes(10)]
    sealed = Sealer().seal(wire(*transaction(100, *chatter, row(), ITEM, row())))
    assert [idx for _, idx, _, _ in cursors(sealed)] == [0, 1]


def test_a_truncate_takes_a_number_for_each_of_its_tables() -> None:
    sealed = Sealer().seal(
        wire(ITEM, PART, *transaction(100, row(), pgoutput.truncate([1, 2]), row(2)))
    )
    assert cursors(sealed) == [
        (100, 0, "I", 1), (100, 1, "T", 1), (100, 3, "T", 2), (100, 4, "I", 2),
    ]  # fmt: skip


def test_a_message_outside_transactions_stands_before_the_commit_that_its_record_touches() -> None:
    loose = pgoutput.logical_message("note", b"x", transactional=False, lsn=200)
    sealed = Sealer().seal(wire(ITEM, *transaction(100, row()), loose, *transaction(200, row())))
    assert cursors(sealed) == [(100, 0, "I", 1), (199, 0, "M", 0), (200, 0, "I", 1)]
    assert sealed is not None
    assert sealed.raw.to_pylist()[1]["commit_ts"] == POSTGRES_EPOCH_US + 5


def test_each_row_keeps_the_schema_in_force_when_it_was_sent() -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])
    sealed = Sealer().seal(wire(ITEM, *transaction(100, row(), wider, row())))
    assert sealed is not None
    before, after = (r["schema_id"] for r in sealed.raw.to_pylist())
    assert sealed.schemas == {before: ITEM, after: wider}


def test_a_batch_carries_only_the_schemas_it_needs() -> None:
    sealer = Sealer()
    sealer.seal(wire(ITEM, PART, *transaction(100, row(1), row(2))))
    sealed = sealer.seal(wire(*transaction(200, row(2))))
    assert sealed is not None
    assert list(sealed.schemas.values()) == [PART]


def test_our_own_tables_are_left_out_but_counted() -> None:
    sealed = Sealer().seal(wire(ITEM, OWN, *transaction(100, row(9), row(1))))
    assert cursors(sealed) == [(100, 2, "I", 1)]
    assert Sealer().seal(wire(OWN, *transaction(100, row(9)))) is None


def test_changes_below_the_resume_cursor_are_skipped() -> None:
    sealed = Sealer(resume=Cursor(100, 1)).seal(
        wire(ITEM, *transaction(90, row()), *transaction(100, row(), row()))
    )
    assert cursors(sealed) == [(100, 1, "I", 1)]


def test_a_sealer_knows_whether_it_is_inside_a_transaction() -> None:
    sealer = Sealer()
    begin, *rest = transaction(100, row(), row())
    sealer.seal(wire(ITEM, begin, rest[0]))
    assert sealer.in_transaction
    sealer.seal(wire(*rest[1:]))
    assert not sealer.in_transaction


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_however_the_stream_is_cut_the_cursors_are_the_same(
    sizes: Sequence[int], cuts: Sequence[int]
) -> None:
    kinds = [row(), pgoutput.truncate([1, 2]), set_annotation(b"1"), row(9)]
    messages = [ITEM, PART, OWN]
    for number, size in enumerate(sizes, start=1):
        messages += transaction(100 * number, *(kinds[i % 4] for i in range(size)))
    whole = Sealer().seal(wire(*messages))
    sealer = Sealer()
    bounds = sorted({0, len(messages), *(cut for cut in cuts if cut < len(messages))})
    pieces = [sealer.seal(wire(*messages[start:end])) for start, end in itertools.pairwise(bounds)]
    assert cursors(*pieces) == cursors(whole)
    assert texts(*pieces) == texts(whole)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([b"?what"], "unknown pgoutput message"),
        ([b""], "empty"),
        ([b"B123"], "shorter than its kind"),
        ([ITEM, pgoutput.begin(1, 0, 0), b"I\0"], "shorter than its kind"),
        ([ITEM, pgoutput.begin(1, 0, 0), b"T" + struct.pack(">IB", 3, 0)], "tables it counts"),
        ([pgoutput.begin(1, 0, 0), row(7)], "never described"),
    ],
)
def test_bytes_that_make_no_sense_are_a_protocol_error(messages: list[bytes], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        Sealer().seal(wire(*messages))


def test_a_broken_relation_is_a_decode_error() -> None:
    with pytest.raises(DecodeError):
        Sealer().seal(wire(ITEM[:-3]))


@given(data=st.data())
def test_mutated_messages_give_typed_errors_or_a_batch(data: st.DataObject) -> None:
    messages = wire(ITEM, PART, *transaction(100, row(), pgoutput.truncate([1, 2]), row(2)))
    at = data.draw(st.integers(0, len(messages) - 1))
    broken = bytearray(messages[at])
    place = data.draw(st.integers(0, len(broken) - 1))
    broken[place] = data.draw(st.integers(0, 255))
    messages[at] = bytes(broken[: data.draw(st.integers(1, len(broken)))])
    try:
        sealed = Sealer().seal(messages)
    except (ProtocolError, DecodeError):
        return
    assert sealed is None or sealed.raw.num_rows <= 10
