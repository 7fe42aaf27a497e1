"""Prepared transactions in the spill: they outlast a restart, and wait for the log to keep them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cdc.cursor import Cursor
from cdc.errors import CorruptionError, GapError, TransientError
from cdc.replication.spill.spill import Spill
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from tests import pgoutput
from tests.unit.replication.streamed import (
    ITEM,
    begun,
    block,
    names,
    prepare,
    row,
    secured,
    take,
)
from tests.unit.replication.streamed import spill as spill


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
