"""A commit that is delivered before it is visible at the source is no difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_pipeline.verify.comparison import TableComparison
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.waiting import until
from tests.workers.test_backfill_visibility import _ITEMS, database, hanging_update, server
from tests.workers.test_verify import _rig

__all__ = ["database", "server"]


def _started(rig: Rig, there: Database) -> int:
    """A verification, begun once the destination has the update that hangs."""
    until("the update", lambda: there.execute("SELECT version FROM item WHERE id = 1") == [(2,)])
    ((number,),) = rig.rows("SELECT id FROM walbrook.start_verification('files', 'item')")
    return int(number)


def test_a_commit_that_hangs_is_waited_for(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path, local_commits=True)
    with rig.running():
        rig.backfilled("item")
        with hanging_update(database):
            number = _started(rig, there)
            query = f"SELECT reason FROM walbrook.verifications WHERE id = {number}"
            until("the reason", lambda: "open transactions" in str(rig.rows(query)[0][0]))
        ended = (
            f"SELECT different FROM walbrook.verifications WHERE id = {number} AND state = 'done'"
        )
        assert until("the end", lambda: rig.rows(ended)) == [(0,)]


def test_a_build_that_does_not_wait_for_open_transactions_reports_a_false_difference(
    database: Database, there: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableComparison, "_until_ended", lambda *_: True)
    database.execute(_ITEMS)
    rig = _rig(database, there, tmp_path, local_commits=True)
    with rig.running():
        rig.backfilled("item")
        with hanging_update(database):
            number = _started(rig, there)
            ended = (
                f"SELECT different FROM walbrook.verifications "
                f"WHERE id = {number} AND state = 'done'"
            )
            assert until("the end", lambda: rig.rows(ended)) == [(1,)]
