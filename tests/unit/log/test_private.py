"""Row values stand in the log's files: no other account of the machine may open or lock them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import OperatorError
from cdc.log.damage_note import report_damage
from cdc.log.files import keep_damaged
from cdc.log.view import LogView
from cdc.log.writer import LogWriter, TierSettings
from cdc.replication.spill.spill import Spill
from cdc.replication.spill.spill_file import SPILL_SCHEMA
from tests.unit.log.batches import active_data, lsns, sealed_log
from tests.unit.log.tiers import ALL, move_all, until


@pytest.fixture(autouse=True)
def _generous_account() -> Iterator[None]:
    """An account whose files are open to everybody unless a program says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def exposed(directory: Path) -> list[str]:
    """What other accounts may do anything with."""
    found = [directory, *directory.rglob("*")]
    return [str(path) for path in found if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def test_the_files_of_a_log_and_its_tier_are_for_their_own_account_alone(tmp_path: Path) -> None:
    log = sealed_log(
        tmp_path / "logs" / "shop", tier=TierSettings(str(tmp_path / "tier"), hot_bytes=3_000)
    )
    move_all(log)
    report_damage(tmp_path / "logs" / "shop")
    keep_damaged(active_data(tmp_path / "logs" / "shop"))
    assert exposed(tmp_path / "logs") + exposed(tmp_path / "tier") == []
    log.close()


def test_a_log_that_others_could_read_is_closed_to_them_when_it_is_opened(tmp_path: Path) -> None:
    directory, tier = tmp_path / "shop", tmp_path / "tier"
    log = sealed_log(directory, tier=TierSettings(str(tier), hot_bytes=3_000))
    move_all(log)
    log.close()
    for path in (directory, *directory.iterdir(), tier / "shop", *(tier / "shop").iterdir()):
        path.chmod(0o777)
    log = LogWriter(directory, term=1, tier=TierSettings(str(tier), hot_bytes=3_000))
    until(lambda: exposed(tier / "shop") == [])
    assert exposed(directory) + exposed(tier / "shop") == []
    assert lsns(directory) == ALL
    log.close()


def test_rows_of_open_transactions_are_for_their_own_account_alone(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "shop" / "spill")
    rows = pa.RecordBatch.from_pylist(
        [dict.fromkeys(SPILL_SCHEMA.names, 0) | {"hidden": False, "payload": b"x"}],
        schema=SPILL_SCHEMA,
    )
    spill.start(0, 0, two_phase=True)
    waiting = spill.wait(7, streamed=False)
    spill.append(waiting, rows, {})
    spill.prepare(waiting)
    spill.secure(0x10, 0x10)
    assert len(list((tmp_path / "shop" / "spill").iterdir())) == 2
    assert exposed(tmp_path / "shop") == []
    for path in (tmp_path / "shop" / "spill").iterdir():
        path.chmod(0o644)
    Spill(tmp_path / "shop" / "spill")
    assert exposed(tmp_path / "shop") == []


def test_a_reader_that_is_there_before_the_writer_makes_a_directory_of_its_own_account(
    tmp_path: Path,
) -> None:
    view = LogView(tmp_path / "logs" / "shop")
    view.wait(0, 0.0)
    view.close()
    assert exposed(tmp_path / "logs") == []


def test_a_file_of_another_account_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop").mkdir()

    def not_the_owner(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    # Tests may run as root, to whom the kernel refuses nothing.
    monkeypatch.setattr(Path, "chmod", not_the_owner)
    with pytest.raises(OperatorError, match="shop can be used by other accounts") as refused:
        LogWriter(tmp_path / "shop")
    assert "chown" in refused.value.fix
