"""Transactions in pieces: published at their commit, with the cursors of the same ones whole."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation, parse_relation
from cdc.errors import CorruptionError, GapError, OperatorError, ProtocolError, TransientError
from cdc.replication.spill.spill import NotStreamableError, Spill
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from tests import pgoutput
from tests.examples import examples
from tests.unit.replication.streamed import block, interleaved, rows, wire
from tests.unit.replication.streamed_history import Row, Transaction, histories

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])


def row(value: object = 1) -> bytes:
    return pgoutput.insert(1, [str(value)])


def take(intake: TransactionAssembler, *messages: bytes) -> list[Row]:
    return rows(intake.take(wire(*messages)))


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    return Spill(tmp_path / "log" / "spill")


@pytest.fixture
def intake(spill: Spill) -> TransactionAssembler:
    return TransactionAssembler(Sealer(), spill)


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


def test_what_a_stream_announced_holds_for_the_connection_after_its_commit(
    intake: TransactionAssembler,
) -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])
    whole = [pgoutput.begin(600, 0, 8), row(), pgoutput.commit(600, 608, 0)]
    take(intake, *block(7, wider, row()))
    with pytest.raises(ProtocolError, match="never described"):
        take(intake, *whole)
    take(intake, pgoutput.stream_commit(7, 500, 508, 0))
    assert [r.schema for r in take(intake, *whole)] == [wider]


def test_what_the_connection_was_told_later_is_not_undone_by_a_commit(
    intake: TransactionAssembler,
) -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])

    def whole(lsn: int, *messages: bytes) -> list[bytes]:
        return [pgoutput.begin(lsn, 0, 8), *messages, pgoutput.commit(lsn, lsn + 8, 0)]

    take(intake, *block(7, ITEM, row()), *whole(300, wider, row()))
    take(intake, pgoutput.stream_commit(7, 500, 508, 0))
    assert [r.schema for r in take(intake, *whole(600, row()))] == [wider]


def test_what_a_rolled_back_savepoint_announced_does_not_hold_after_the_commit(
    intake: TransactionAssembler,
) -> None:
    wider = pgoutput.relation(1, "public", "item", [("id", 23, True), ("b", 25)])
    take(intake, pgoutput.begin(300, 0, 8), ITEM, row(), pgoutput.commit(300, 308, 0))
    take(intake, *block(7, wider, row(), sub=9), pgoutput.stream_abort(7, 9))
    take(intake, pgoutput.stream_commit(7, 500, 508, 0))
    found = take(intake, pgoutput.begin(600, 0, 8), row(), pgoutput.commit(600, 608, 0))
    assert [r.schema for r in found] == [ITEM]


def test_what_a_rolled_back_stream_announced_is_forgotten(intake: TransactionAssembler) -> None:
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


def consume(steps: Iterable[object]) -> None:
    for _ in steps:
        pass


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


def begun(directory: Path, *, bytes_max: int = 1 << 20) -> Spill:
    """A spill of a connection that gets prepared transactions."""
    spill = Spill(directory, bytes_max=bytes_max)
    spill.start(0, 0, two_phase=True)
    return spill


def names(directory: Path) -> list[str]:
    """The files of rows."""
    return [path.name for path in directory.glob("*.rows")]


def prepare(intake: TransactionAssembler, value: object = 1, *, xid: int = 8) -> list[Row]:
    begin, end = pgoutput.begin_prepare(200, xid, "g"), pgoutput.prepare(200, xid, "g")
    return take(intake, begin, ITEM, row(value), end)


def test_a_prepared_transaction_survives_a_restart(tmp_path: Path) -> None:
    spill = begun(tmp_path)
    prepare(TransactionAssembler(Sealer(), spill), "kept")
    assert spill.secure(300, 400) == 300
    again = TransactionAssembler(Sealer(), Spill(tmp_path))
    found = take(again, pgoutput.commit_prepared(600, 77, 8, "g"))
    assert [(r.lsn, r.idx, r.xid, r.commit_ts, r.payload) for r in found] == [
        (600, 0, 8, 77, row("kept"))
    ]


def test_a_restart_begins_where_the_list_on_disk_is_complete(tmp_path: Path) -> None:
    spill = begun(tmp_path)
    intake = TransactionAssembler(Sealer(), spill)
    spill.secure(100, 100)
    prepare(intake, "not secured")  # at 200, and the log goes on to 500
    again = Spill(tmp_path)
    assert again.start(500, 50, two_phase=True) == 100, "the source sends the PREPARE again"
    assert names(tmp_path) == []
    assert again.secure(500, 500) == 100, "which may still be on its way"
    prepare(TransactionAssembler(Sealer(resume=Cursor(500, 0)), again))
    assert again.secure(500, 501) == 500
    assert len(names(tmp_path)) == 1
    assert again.start(502, 500, two_phase=True) == 502, "this process has received all below"


def test_without_prepared_transactions_nothing_is_held_back_or_written(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill")
    assert spill.start(500, 100, two_phase=False) == 500
    assert spill.secure(450, 600) == 450
    assert not (tmp_path / "spill").exists()


def test_syncs_do_not_grow_with_the_transactions_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = os.fsync

    def count(file: int) -> None:
        synced.append(file)
        sync(file)

    monkeypatch.setattr(os, "fsync", count)
    spill = begun(tmp_path)
    intake = TransactionAssembler(Sealer(), spill)
    begin = len(synced)
    for xid in range(1, 101):
        prepare(intake, xid=xid)
        if xid < 100:
            take(intake, pgoutput.commit_prepared(600 + xid, 0, xid, "g"))
    spill.settled(Cursor(800, 0))
    spill.secure(800, 800)
    assert len(synced) - begin <= 3, "the rows of the one that waits, the list and its folder"
    assert len(names(tmp_path)) == 1


def test_a_gid_that_comes_in_another_encoding_is_the_same_transaction(tmp_path: Path) -> None:
    intake = TransactionAssembler(Sealer(), begun(tmp_path))
    stored, translated = "ü".encode("latin-1"), "ü".encode()

    def named(message: bytes, gid: bytes) -> bytes:
        return message.removesuffix(b"g\0") + gid + b"\0"

    begin, end = pgoutput.begin_prepare(200, 8, "g"), pgoutput.prepare(200, 8, "g")
    take(intake, named(begin, translated), ITEM, row(), named(end, translated))
    commit = pgoutput.commit_prepared(600, 0, 8, "g")
    assert len(take(intake, named(commit, stored))) == 1


def test_rolled_back_savepoints_of_a_prepared_stream_stay_left_out_after_a_restart(
    tmp_path: Path,
) -> None:
    spill = begun(tmp_path)
    intake = TransactionAssembler(Sealer(), spill)
    take(intake, *block(7, ITEM, row("a")), *block(7, ITEM, row("b"), first=False, sub=8))
    take(intake, pgoutput.stream_abort(7, 8), pgoutput.stream_prepare(200, 7, "g"))
    spill.secure(300, 300)
    found = take(
        TransactionAssembler(Sealer(), Spill(tmp_path)), pgoutput.commit_prepared(600, 0, 7, "g")
    )
    assert [r.payload for r in found] == [row("a")]


def test_streamed_rows_do_not_survive_a_restart(tmp_path: Path) -> None:
    intake = TransactionAssembler(Sealer(), Spill(tmp_path))
    take(intake, *block(7, ITEM, row()))
    assert list(tmp_path.iterdir())
    Spill(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_prepare_that_is_sent_again_replaces_the_first(tmp_path: Path) -> None:
    spill = begun(tmp_path)
    prepare(TransactionAssembler(Sealer(), spill))
    spill.secure(300, 300)
    spill = begun(tmp_path)
    intake = TransactionAssembler(Sealer(), spill)
    prepare(intake)
    assert len(names(tmp_path)) == 2, "the list on disk still names the first"
    spill.secure(301, 301)
    assert len(names(tmp_path)) == 1
    assert len(take(intake, pgoutput.commit_prepared(600, 0, 8, "g"))) == 1


def test_a_prepared_transaction_is_kept_until_the_log_keeps_it(tmp_path: Path) -> None:
    spill = begun(tmp_path)
    intake = TransactionAssembler(Sealer(), spill)
    prepare(intake)
    take(intake, pgoutput.commit_prepared(600, 0, 8, "g"))
    spill.secure(500, 600)
    # The log lost its end in a crash, and the source sends the commit alone.
    spill = Spill(tmp_path)
    spill.start(600, 500, two_phase=True)
    intake = TransactionAssembler(Sealer(resume=Cursor(600, 0)), spill)
    assert len(take(intake, pgoutput.commit_prepared(600, 0, 8, "g"))) == 1
    spill.settled(Cursor(600, 0))
    assert spill.size_bytes > 0
    spill.settled(Cursor(601, 0))
    spill.secure(601, 601)
    assert spill.size_bytes == 0
    assert names(tmp_path) == []


@pytest.mark.parametrize("prepared_again", [False, True])
def test_a_commit_that_comes_again_does_not_drop_rows_that_the_log_does_not_keep_yet(
    tmp_path: Path, prepared_again: bool
) -> None:
    spill = begun(tmp_path)
    begin, end = pgoutput.begin_prepare(200, 8, "g"), pgoutput.prepare(200, 8, "g")
    commit = pgoutput.commit_prepared(600, 0, 8, "g")
    intake = TransactionAssembler(Sealer(), spill)
    take(intake, begin, ITEM, *(row(n) for n in range(3)), end)
    assert len(take(intake, commit)) == 3
    # The connection ends while the log has all three rows, and only the first on disk.
    intake = TransactionAssembler(Sealer(resume=Cursor(600, 3)), spill)
    if prepared_again:
        take(intake, begin, ITEM, *(row(n) for n in range(3)), end)
    assert take(intake, commit) == []
    spill.settled(Cursor(600, 1))
    spill.secure(600, 600)
    # A crash takes those two from the log.
    intake = TransactionAssembler(Sealer(resume=Cursor(600, 1)), Spill(tmp_path))
    assert [r.idx for r in take(intake, commit)] == [1, 2]


def test_a_commit_that_was_settled_before_may_come_again_without_rows(spill: Spill) -> None:
    intake = TransactionAssembler(Sealer(resume=Cursor(700, 0)), spill)
    assert take(intake, pgoutput.commit_prepared(600, 0, 8, "g")) == []


def test_a_commit_of_rows_that_are_not_here_is_a_gap(tmp_path: Path) -> None:
    intake = TransactionAssembler(Sealer(), Spill(tmp_path, source="shop"))
    with pytest.raises(GapError, match="'g' is committed at 0/258") as caught:
        take(intake, pgoutput.commit_prepared(600, 0, 8, "g"))
    assert caught.value.kind == "prepared_missing"
    assert "SELECT walbrook.accept_gap('shop', '0/259')" in caught.value.fix


def test_rows_that_everyone_has_given_up_are_no_gap(spill: Spill) -> None:
    intake = TransactionAssembler(Sealer(), spill, settled=Cursor(601, 0))
    assert take(intake, pgoutput.commit_prepared(600, 0, 8, "g")) == []


def test_a_rollback_of_a_prepared_transaction_leaves_nothing(tmp_path: Path) -> None:
    spill = begun(tmp_path)
    intake = TransactionAssembler(Sealer(), spill)
    prepare(intake)
    spill.secure(300, 300)
    assert take(intake, pgoutput.rollback_prepared(200, 300, 8, "g")) == []
    assert spill.size_bytes == 0
    # A crash before the rollback is confirmed: the source sends it again.
    again = Spill(tmp_path)
    assert again.start(400, 300, two_phase=True) == 300
    intake = TransactionAssembler(Sealer(), again)
    assert take(intake, pgoutput.rollback_prepared(200, 300, 8, "g")) == []
    again.secure(401, 401)
    assert names(tmp_path) == []
    assert Spill(tmp_path).size_bytes == 0
    assert take(intake, pgoutput.rollback_prepared(200, 300, 8, "g")) == []


def test_a_block_that_a_batch_cuts_keeps_the_position_in_place(
    intake: TransactionAssembler,
) -> None:
    start, *rest = block(7, ITEM, row())
    take(intake, start, rest[0])
    assert intake.in_transaction
    take(intake, *rest[1:])
    assert not intake.in_transaction


def test_a_heartbeat_takes_a_number_and_is_told_but_not_logged(
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


def secured(directory: Path) -> None:
    """A prepared transaction that is on disk."""
    spill = begun(directory)
    prepare(TransactionAssembler(Sealer(), spill))
    spill.secure(300, 300)


def test_damaged_spilled_rows_are_reported(tmp_path: Path) -> None:
    secured(tmp_path)
    (path,) = tmp_path.glob("*.rows")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="do not match their checksum"):
        take(
            TransactionAssembler(Sealer(), Spill(tmp_path)),
            pgoutput.commit_prepared(600, 0, 8, "g"),
        )


def test_damaged_rows_of_a_prepared_transaction_that_was_given_up_are_no_longer_read(
    tmp_path: Path,
) -> None:
    secured(tmp_path)
    (path,) = tmp_path.glob("*.rows")
    path.write_bytes(b"x" * path.stat().st_size)
    spill = Spill(tmp_path)
    intake = TransactionAssembler(Sealer(), spill, settled=Cursor(601, 0))
    assert take(intake, pgoutput.commit_prepared(600, 0, 8, "g")) == []
    assert spill.size_bytes == 0


def test_rows_that_the_log_already_has_are_skipped_and_counted(tmp_path: Path) -> None:
    secured(tmp_path)
    skipped: list[bool] = []
    intake = TransactionAssembler(
        Sealer(resume=Cursor(700, 0)), Spill(tmp_path), skipped=lambda: skipped.append(True)
    )
    assert take(intake, pgoutput.commit_prepared(600, 0, 8, "g")) == []
    assert skipped


def test_prepared_rows_that_someone_removed_are_reported(tmp_path: Path) -> None:
    secured(tmp_path)
    for path in tmp_path.glob("*.rows"):
        path.unlink()
    with pytest.raises(CorruptionError, match="do not match their checksum"):
        take(
            TransactionAssembler(Sealer(), Spill(tmp_path)),
            pgoutput.commit_prepared(600, 0, 8, "g"),
        )


def test_a_damaged_list_of_prepared_transactions_is_reported_at_the_start(tmp_path: Path) -> None:
    secured(tmp_path)
    listed = tmp_path / "prepared.json"
    listed.write_text(listed.read_text().replace("300", "301"))
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        Spill(tmp_path)


def test_nothing_is_confirmed_beyond_what_could_not_be_put_on_disk(tmp_path: Path) -> None:
    spill = begun(tmp_path / "spill")
    prepare(TransactionAssembler(Sealer(), spill))
    shutil.rmtree(tmp_path / "spill")
    with pytest.raises(TransientError, match="cannot be written"):
        spill.secure(300, 300)


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
