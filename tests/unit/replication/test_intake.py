"""Transactions in pieces: published at their commit, with the cursors of the same ones whole."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation, parse_relation
from cdc.errors import OperatorError, ProtocolError, TransientError
from cdc.replication.spill.spill import NotStreamableError, Spill
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from tests import pgoutput
from tests.examples import examples
from tests.unit.replication.streamed import (
    ITEM,
    begun,
    block,
    consume,
    interleaved,
    prepare,
    row,
    take,
    wire,
)
from tests.unit.replication.streamed import intake as intake
from tests.unit.replication.streamed import spill as spill
from tests.unit.replication.streamed_history import Row, Transaction, histories


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), history=histories)
def test_however_it_is_sent_and_cut_the_log_is_that_of_whole_transactions(
    data: st.DataObject, history: list[Transaction]
) -> None:
    server = interleaved(data, history)
    cuts = data.draw(st.lists(st.integers(0, len(server.messages)), max_size=6))
    rows = [r for r in server.rows if r.kind != "S"]
    resume = data.draw(st.sampled_from([ORIGIN, *(Cursor(r.lsn, r.idx) for r in rows)]))
    bounds = sorted({0, len(server.messages), *cuts})
    with tempfile.TemporaryDirectory() as directory:
        spill = Spill(Path(directory) / "spill")
        intake = TransactionAssembler(Sealer(resume=resume), spill, BatchLimits(rows=3))
        found = [
            found
            for start, end in itertools.pairwise(bounds)
            for found in take(intake, *server.messages[start:end])
        ]
        assert found == [r for r in rows if Cursor(r.lsn, r.idx) >= resume]
        assert spill.transactions == 0


def test_a_stream_flows_into_the_spill_before_its_commit(
    intake: TransactionAssembler, spill: Spill
) -> None:
    assert take(intake, *block(7, ITEM, *(row(n) for n in range(50)))) == []
    before = spill.size_bytes
    assert take(intake, *block(7, *(row(n) for n in range(50)), first=False)) == []
    assert spill.size_bytes > before > 0
    found = take(intake, pgoutput.stream_commit(7, 500, 508, 99))
    assert [(r.lsn, r.idx, r.xid, r.commit_ts) for r in found] == [
        (500, n, 7, 99) for n in range(100)
    ]
    assert spill.size_bytes == 0


def test_a_whole_transaction_between_blocks_comes_out_before_the_streamed_one(
    intake: TransactionAssembler,
) -> None:
    whole = [pgoutput.begin(300, 0, 8), ITEM, row(2), pgoutput.commit(300, 308, 0)]
    found = take(
        intake,
        *block(7, ITEM, row(1)), *whole, *block(7, row(3), first=False),
        pgoutput.stream_commit(7, 500, 508, 0),
    )  # fmt: skip
    assert [(r.lsn, r.idx, r.payload) for r in found] == [
        (300, 0, row(2)), (500, 0, row(1)), (500, 1, row(3)),
    ]  # fmt: skip


def test_a_large_transaction_comes_out_in_bounded_batches(spill: Spill) -> None:
    intake = TransactionAssembler(Sealer(), spill, BatchLimits(rows=10))
    for at in range(20):
        take(intake, *block(7, ITEM, *(row(n) for n in range(4)), first=at == 0))
    batches = list(intake.take(wire(pgoutput.stream_commit(7, 500, 508, 0))))
    assert [batch.raw.num_rows for batch in batches] == [8] * 10
    assert batches[3].first == Cursor(500, 24)
    assert batches[3].high == Cursor(500, 32)


def test_a_relation_of_a_stream_holds_for_the_connection_after_its_commit(
    intake: TransactionAssembler,
) -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])
    whole = [pgoutput.begin(600, 0, 8), row(), pgoutput.commit(600, 608, 0)]
    take(intake, *block(7, wider, row()))
    with pytest.raises(ProtocolError, match="never described"):
        take(intake, *whole)
    take(intake, pgoutput.stream_commit(7, 500, 508, 0))
    assert [r.schema for r in take(intake, *whole)] == [wider]


def test_a_later_relation_of_the_connection_is_not_undone_by_a_commit(
    intake: TransactionAssembler,
) -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])

    def whole(lsn: int, *messages: bytes) -> list[bytes]:
        return [pgoutput.begin(lsn, 0, 8), *messages, pgoutput.commit(lsn, lsn + 8, 0)]

    take(intake, *block(7, ITEM, row()), *whole(300, wider, row()))
    take(intake, pgoutput.stream_commit(7, 500, 508, 0))
    assert [r.schema for r in take(intake, *whole(600, row()))] == [wider]


def test_a_relation_of_a_rolled_back_savepoint_does_not_hold_after_the_commit(
    intake: TransactionAssembler,
) -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])
    take(intake, pgoutput.begin(300, 0, 8), ITEM, row(), pgoutput.commit(300, 308, 0))
    take(intake, *block(7, wider, row(), sub=9), pgoutput.stream_abort(7, 9))
    take(intake, pgoutput.stream_commit(7, 500, 508, 0))
    found = take(intake, pgoutput.begin(600, 0, 8), row(), pgoutput.commit(600, 608, 0))
    assert [r.schema for r in found] == [ITEM]


def test_a_relation_of_a_rolled_back_stream_is_forgotten(intake: TransactionAssembler) -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])
    take(intake, pgoutput.begin(300, 0, 8), ITEM, row(), pgoutput.commit(300, 308, 0))
    take(intake, *block(7, wider, row()), pgoutput.stream_abort(7, 7))
    found = take(intake, pgoutput.begin(600, 0, 8), row(), pgoutput.commit(600, 608, 0))
    assert [r.schema for r in found] == [ITEM]


def test_the_catalog_is_asked_for_a_key_only_after_the_commit(spill: Spill) -> None:
    asked: list[str] = []

    def catalog_of(relation: Relation, _xid: int) -> CatalogNote:
        asked.append(relation.name)
        return CatalogNote(("b", "id"))

    table = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25, True)])
    intake = TransactionAssembler(Sealer(catalog_of=catalog_of), spill)
    take(intake, *block(7, table, row()))
    take(intake, pgoutput.begin_prepare(200, 8, "g"), table, row(), pgoutput.prepare(200, 8, "g"))
    assert asked == []
    (streamed,) = take(intake, pgoutput.stream_commit(7, 500, 508, 0))
    (prepared,) = take(intake, pgoutput.commit_prepared(600, 0, 8, "g"))
    assert asked == ["item", "item"]
    assert parse_relation(streamed.schema).key == (1, 0)
    assert prepared.schema == streamed.schema


def test_a_message_in_a_stream_with_a_rolled_back_savepoint_is_in_doubt(
    intake: TransactionAssembler,
) -> None:
    take(intake, *block(7, ITEM, pgoutput.logical_message("note", b""), row()))
    with pytest.raises(NotStreamableError, match="do not say") as caught:
        take(intake, pgoutput.stream_abort(7, 8))
    assert caught.value.kind == "message_in_doubt"


def test_a_full_spill_asks_for_the_transaction_to_come_whole(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill", bytes_max=20_000)
    intake = TransactionAssembler(Sealer(), spill)
    blocks = [block(7, ITEM, row("x" * 1000), first=at == 0) for at in range(100)]
    with pytest.raises(NotStreamableError, match="allowed") as caught:
        consume(take(intake, *one) for one in blocks)
    assert caught.value.kind == "spill_full"
    assert 10_000 < spill.size_bytes <= 20_000


def test_a_spill_full_of_prepared_transactions_is_for_the_operator(tmp_path: Path) -> None:
    intake = TransactionAssembler(Sealer(), Spill(tmp_path / "spill", bytes_max=20_000))
    with pytest.raises(OperatorError, match="have not ended") as caught:
        consume(prepare(intake, "x" * 1000, xid=xid) for xid in range(1, 100))
    assert "log.max_bytes" in caught.value.fix


def test_a_spill_full_of_committed_transactions_waits_for_the_log_to_keep_them(
    tmp_path: Path,
) -> None:
    spill = begun(tmp_path, bytes_max=20_000)
    intake = TransactionAssembler(Sealer(), spill)
    committed: list[int] = []

    def prepare_and_commit(xid: int) -> list[Row]:
        prepare(intake, "x" * 1000, xid=xid)
        found = take(intake, pgoutput.commit_prepared(600 + xid, 0, xid, "g"))
        committed.append(600 + xid)
        return found

    with pytest.raises(TransientError, match="are committed") as caught:
        consume(prepare_and_commit(xid) for xid in range(1, 100))
    assert caught.value.kind == "spill_full"
    assert not isinstance(caught.value, NotStreamableError), "they cannot come another way"
    spill.settled(Cursor(committed[-1], 1))
    intake = TransactionAssembler(Sealer(resume=Cursor(committed[-1], 1)), spill)
    assert spill.size_bytes == 0
    assert take(intake, pgoutput.commit_prepared(committed[-1], 0, committed[-1] - 600, "g")) == []
    prepare_and_commit(100)


def test_a_block_that_a_batch_cuts_keeps_the_position_in_place(
    intake: TransactionAssembler,
) -> None:
    start, *rest = block(7, ITEM, row())
    take(intake, start, rest[0])
    assert intake.in_transaction
    take(intake, *rest[1:])
    assert not intake.in_transaction


def test_a_heartbeat_takes_a_number_and_is_reported_but_not_logged(
    intake: TransactionAssembler,
) -> None:
    beat = pgoutput.logical_message("walbrook.heartbeat", b"17")
    alike = pgoutput.logical_message("walbrook.heartbeats", b"18")
    found = take(
        intake, ITEM, pgoutput.begin(300, 0, 8), beat, alike, row(), pgoutput.commit(300, 308, 0)
    )
    assert [(r.idx, r.kind) for r in found] == [(1, "M"), (3, "I")]
    assert intake.heartbeats == [b"17"]
    loose = pgoutput.logical_message("walbrook.heartbeat", b"19", transactional=False, lsn=400)
    assert take(intake, loose) == []
    assert intake.heartbeats == [b"19"]
    take(intake, pgoutput.begin(500, 0, 8), row(), pgoutput.commit(500, 508, 0))
    assert intake.heartbeats == []
    take(intake, loose, loose)
    assert intake.heartbeats == [b"19", b"19"], "one of another reader must not hide ours"


def test_a_truncate_of_many_tables_takes_memory_by_table_not_by_its_square(
    intake: TransactionAssembler,
) -> None:
    oids = list(range(1, 20_001))
    known = [pgoutput.relation(oid, "public", f"t{oid}", [("id", 23, True)]) for oid in oids]
    take(intake, *known)
    (sealed,) = intake.take(
        wire(pgoutput.begin(300, 0, 8), pgoutput.truncate(oids), pgoutput.commit(300, 308, 0))
    )
    assert sealed.raw.num_rows == len(oids)
    assert sealed.raw.column("payload").nbytes < 100 * len(oids)
    assert sealed.raw.column("payload")[4].as_py() == pgoutput.truncate([5])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([pgoutput.stream_stop()], "nest or end twice"),
        ([pgoutput.stream_start(7, first=True)] * 2, "nest or end twice"),
        ([pgoutput.stream_start(7, first=True), b"P"], "ends as another kind"),
        ([pgoutput.stream_start(7, first=True), pgoutput.begin(1, 0, 1)], "inside another"),
        ([pgoutput.begin(1, 0, 1), *block(7, ITEM)], "inside a whole one"),
        (block(7, ITEM, first=False), "goes on"),
        (block(7, ITEM) * 2, "begins again"),
        ([pgoutput.stream_commit(7, 1, 1, 0)], "without having begun"),
        ([pgoutput.stream_prepare(1, 7, "g")], "without having begun"),
        ([pgoutput.stream_commit(7, 1, 1, 0)[:-1]], "kind b'c' has"),
        ([pgoutput.stream_commit(7, 2**63, 1, 0)], "no server reaches"),
        ([pgoutput.commit_prepared(1, 0, 7, "g")[:-1]], "does not end with a name"),
        ([pgoutput.commit_prepared(1, 0, 0, "g")], "no xid"),
        ([pgoutput.stream_start(7, first=True), b"I\0\0"], "shorter than its kind"),
        (block(7, ITEM, row()[:4]), "shorter than its kind"),
        (block(7, pgoutput.logical_message("a", b"", transactional=False)), "stands inside one"),
    ],
)
def test_pieces_that_make_no_sense_are_a_protocol_error(
    intake: TransactionAssembler, messages: list[bytes], says: str
) -> None:
    with pytest.raises(ProtocolError, match=says):
        take(intake, *messages)
