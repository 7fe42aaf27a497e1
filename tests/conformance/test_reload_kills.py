"""A delivering process dies at every step of a reload: the table ends as it must, exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.failpoints import VARIABLE
from tests.fix_postgres import Database
from tests.iceberg_lake import IcebergLake
from tests.lake import query
from tests.reload_history import recorded
from tests.reload_rig import ways

ROOT = Path(__file__).parents[2]
_STARTS_MAX = 60
_LAST = """
SELECT id, v FROM (SELECT id, v, walbrook_action AS act, row_number() OVER (
    PARTITION BY id ORDER BY walbrook_lsn DESC, walbrook_idx DESC) AS nth FROM {table}) s
 WHERE nth = 1 AND act <> 'delete' ORDER BY id
"""
_TWICE = "SELECT walbrook_lsn, walbrook_idx FROM {table} GROUP BY 1, 2 HAVING count(*) > 1"
_OLDER = "SELECT count(*) FROM {table} WHERE walbrook_action = 'insert' AND id <= 50"


def _select(way: str, sql: str, there: Database, root: Path) -> list[tuple[object, ...]]:
    if way.startswith("postgres"):
        return there.execute(sql)
    if way.startswith("delta"):
        return query(sql, t=root / "public" / "t")
    return IcebergLake(root).rows(sql, "t")


@pytest.mark.sinks
@pytest.mark.timeout(900)
@ways
def test_a_reload_ends_right_whatever_step_it_died_at(
    way: str, database: Database, there: Database, tmp_path: Path
) -> None:
    file = tmp_path / "changes.arrow"
    recorded(database, file)
    expected = database.execute("SELECT id, v FROM t ORDER BY id")
    is_postgres = way.startswith("postgres")
    place = there.dsn if is_postgres else str(tmp_path / "lake")
    deaths = 0
    for number in range(_STARTS_MAX):
        # In the middle of the next delivery, and right behind it.
        middle, behind = ("applied", "moved") if is_postgres else ("written", "committed")
        failpoint = f"{behind}:{number // 2 + 1}" if number % 2 else middle
        done = subprocess.run(
            [sys.executable, "-m", "tests.reload_deliverer", way, place, str(file)],
            cwd=ROOT, env=os.environ | {VARIABLE: failpoint}, timeout=300,
        )  # fmt: skip
        assert done.returncode <= 0, "it failed"
        if done.returncode == 0 and number % 2:
            break
        deaths += done.returncode < 0
    assert done.returncode == 0
    assert deaths >= 7
    append = way.endswith("append")
    select = _LAST if append else "SELECT id, v FROM {table} ORDER BY id"
    assert _select(way, select.format(table="t"), there, tmp_path / "lake") == expected
    if append:
        assert _select(way, _TWICE.format(table="t"), there, tmp_path / "lake") == []
        assert _select(way, _OLDER.format(table="t"), there, tmp_path / "lake") == [(0,)]
    if is_postgres:
        found = there.execute("SELECT relname FROM pg_class WHERE relname LIKE 'reload%'")
        assert found == []
    else:
        assert not [*(tmp_path / "lake").glob("_walbrook*/reload*")]
