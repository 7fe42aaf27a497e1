"""Reload of a table: readers see the old one, then the complete new one, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from sinks.lakehouse import stopped as stopped_tables
from tests.fix_postgres import Database
from tests.reload_rig import Reloading, close_sinks, merging, ways
from tests.waiting import until

_REFUSES = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the state database refuses'; END $$;
CREATE TRIGGER refuses BEFORE UPDATE ON walbrook.backfill_chunks FOR EACH ROW
  WHEN (OLD.kind = 'swap' AND NEW.state = 'done') EXECUTE FUNCTION refuse()
"""


@pytest.fixture(autouse=True)
def _no_open_sinks() -> Iterator[None]:
    yield
    close_sinks()


def loaded(way: str, database: Database, there: Database, directory: Path) -> Reloading:
    """The destination has all rows."""
    reloading = Reloading(way, database, there, directory)
    with reloading.rig.running():
        reloading.rig.backfilled("item")
        reloading.until_equal()
    return reloading


@ways
def test_readers_see_the_old_table_and_then_the_whole_new_one(
    way: str, database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded(way, database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        reloading.go_wrong()
        rig.until_delivered()
        with reloading.watched() as seen, reloading.changing():
            number = rig.start("item", chunk_bytes=1 << 20, reload=True)
            rig.until_state(number)
            rig.until_delivered()
        assert True in seen
        reloading.until_equal()
        assert not reloading.is_wrong(reloading.held())
        table = "item" if way.startswith("postgres") else "t"
        bodies = f"SELECT count(DISTINCT id) FROM {table} WHERE body = 'hidden'"
        assert reloading.select(bodies) == database.execute(bodies.replace(" t ", " item "))
    assert reloading.shadows() == []


def slowly(reloading: Reloading) -> int:
    """Start a reload that reads few rows a second, and wait until its shadow is there."""
    number = reloading.rig.start("item", chunk_bytes=1 << 16, rows_per_second=500, reload=True)
    until("the shadow", reloading.shadows)
    return number


@ways
def test_a_cancelled_reload_leaves_the_table_as_it_is_and_no_shadow(
    way: str, database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded(way, database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        reloading.go_wrong()
        number = slowly(reloading)
        database.execute("UPDATE item SET version = 7 WHERE id = 500")
        rig.until_delivered()
        assert reloading.held()[500] == 7
        assert reloading.is_wrong(reloading.held())
        rig.rows(f"SELECT walbrook.cancel_backfill({number})")
        until("the shadow to go", lambda: not reloading.shadows())
        database.execute("UPDATE item SET version = 8 WHERE id = 500")
        rig.until_delivered()
        assert reloading.held()[500] == 8
        assert reloading.is_wrong(reloading.held())
        rig.backfilled("item", reload=True)
        reloading.until_equal()
    assert reloading.shadows() == []


@ways
def test_a_reload_goes_on_in_a_new_process_and_takes_schema_changes_along(
    way: str, database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded(way, database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        reloading.go_wrong()
        number = slowly(reloading)
        database.execute("UPDATE item SET version = 2 WHERE id = 500")
    database.execute(
        "ALTER TABLE item ADD COLUMN extra int NOT NULL DEFAULT 7;"
        "UPDATE item SET version = 3, extra = 8 WHERE id = 501;"
        "ALTER TABLE item RENAME COLUMN extra TO more"
    )
    with rig.running():
        rig.until_state(number)
        reloading.until_equal()
        # Nothing of the table came since its last column was renamed but what the reload read.
        table = "item" if way.startswith("postgres") else "t"
        counted = f"SELECT more, count(DISTINCT id) FROM {table} WHERE more IS NOT NULL GROUP BY 1"
        assert dict(reloading.select(counted))[8] == 1
        assert dict(reloading.select(counted))[7] > 1_000
    assert reloading.shadows() == []


@merging
def test_a_truncate_empties_the_shadow_too(
    way: str, database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded(way, database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        reloading.go_wrong()
        number = slowly(reloading)
        database.execute(
            "TRUNCATE item; INSERT INTO item SELECT i, 5, '' FROM generate_series(1, 9) i"
        )
        rig.until_state(number)
        reloading.until_equal()
        assert len(reloading.held()) == 9


@ways
def test_a_swap_that_the_state_database_did_not_hear_of_comes_again_and_changes_nothing(
    way: str, database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded(way, database, there, tmp_path)
    rig = reloading.rig
    database.execute(_REFUSES)
    with rig.running():
        reloading.go_wrong()
        with reloading.changing():
            number = rig.start("item", chunk_bytes=1 << 20, reload=True)
            until("the swap", lambda: not reloading.is_wrong(reloading.held()))
        assert rig.progress(number)[0] == "running"
        waits = f"SELECT waits_for FROM walbrook.backfills WHERE id = {number}"
        assert rig.rows(waits) == [("swap",)]
    with rig.running():
        database.execute("DROP TRIGGER refuses ON walbrook.backfill_chunks")
        with reloading.watched() as seen, reloading.changing():
            rig.until_state(number)
            rig.until_delivered()
        assert True not in seen
        reloading.until_equal()
        if way.endswith("append"):
            table = "item" if way.startswith("postgres") else "t"
            twice = (
                f"SELECT walbrook_lsn, walbrook_idx FROM {table} GROUP BY 1, 2 HAVING count(*) > 1"
            )
            assert reloading.select(twice) == []
    assert reloading.shadows() == []


def test_a_swap_that_the_destination_refuses_fails_the_backfill_alone(
    database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded("postgres mirror", database, there, tmp_path)
    rig = reloading.rig
    there.execute(
        "CREATE TABLE part (item int REFERENCES item); INSERT INTO part VALUES (5);"
        "CREATE VIEW newest AS SELECT max(id) FROM item; GRANT SELECT ON item TO PUBLIC"
    )
    with rig.running():
        reloading.go_wrong()
        number = rig.start("item", reload=True)
        until("the refusal", lambda: rig.progress(number)[0] == "failed")
        why = rig.progress(number)[2]
        assert "its swap failed" in why
        assert "part_item_fkey" in why
        database.execute("UPDATE item SET version = 9 WHERE id = 600")
        rig.until_delivered()
        assert reloading.held()[600] == 9
        there.execute("DELETE FROM part")
        rig.rows(f"SELECT walbrook.retry_backfill({number})")
        rig.until_state(number)
        reloading.until_equal()
        assert there.execute("SELECT * FROM newest") == [(100_050,)]
        row = rig.verified()
        assert (row.missing, row.extra, row.different) == (0, 0, 0)
    assert reloading.shadows() == []


def test_a_reload_is_refused_with_words(
    database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = Reloading("postgres mirror", database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        number = rig.start("item", reload=True)
        until("the refusal", lambda: rig.progress(number)[0] == "failed")
        assert "is not there yet" in rig.progress(number)[2]
        with pytest.raises(psycopg.Error, match=f"backfill {number} of public.item into files"):
            rig.start("item", reload=True)
        rig.rows(f"SELECT walbrook.cancel_backfill({number})")
        with pytest.raises(psycopg.Error, match="neither where_sql nor start_position"):
            rig.start("item", where_sql="true", reload=True)
        rig.rows("UPDATE walbrook.consumers SET reload_refusal = 'it is a file' RETURNING 1")
        with pytest.raises(psycopg.Error, match="cannot be reloaded: it is a file"):
            rig.start("item", reload=True)
    assert reloading.shadows() == []


def test_a_table_that_is_renamed_meanwhile_loses_its_shadow(
    database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded("postgres mirror", database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        number = slowly(reloading)
        rig.rows(f"SELECT walbrook.pause_backfill({number})")
        database.execute(
            "ALTER TABLE item RENAME TO thing; UPDATE thing SET version = 4 WHERE id = 8"
        )
        rig.until_delivered()
        assert reloading.shadows() == []
        database.execute(
            "ALTER TABLE thing RENAME TO item; UPDATE item SET version = 5 WHERE id = 9"
        )
        rig.rows(f"SELECT walbrook.resume_backfill({number})")
        until("the refusal", lambda: rig.progress(number)[0] == "failed")
        assert "has no shadow" in rig.progress(number)[2]
        reloading.until_equal()


def test_no_row_is_read_before_transactions_end_that_are_older_than_the_shadow(
    database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded("postgres mirror", database, there, tmp_path)
    rig = reloading.rig
    with rig.running(), database.connect() as writer:
        rig.backfilled("item")  # by now transactions are listed
        writer.execute("BEGIN")
        writer.execute("UPDATE item SET version = 4 WHERE id = 5")
        number = rig.start("item", reload=True)
        waits = f"SELECT waits_for FROM walbrook.backfills WHERE id = {number}"
        until("the wait", lambda: rig.rows(waits) == [("open_transactions",)])
        progress = f"SELECT rows_read, reload FROM walbrook.backfill_progress WHERE id = {number}"
        assert rig.rows(progress) == [(0, True)]
        writer.execute("COMMIT")
        rig.until_state(number)
        reloading.until_equal()


def test_a_rewind_brings_nothing_into_the_shadow_that_is_older(
    database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded("postgres mirror", database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        database.execute("INSERT INTO item VALUES (20000, 1, '')")
        rig.until_delivered()
        database.execute("ALTER PUBLICATION pub DROP TABLE item")
        database.execute("DELETE FROM item WHERE id = 20000")
        database.execute("ALTER PUBLICATION pub ADD TABLE item")
        number = slowly(reloading)
        database.execute("UPDATE item SET version = 6 WHERE id = 700")
        rig.until_delivered()
        rig.rows("SELECT walbrook.rewind('files', to_earliest => true)")
        rig.until_delivered()
        assert 20_000 in reloading.held()
        rig.until_state(number)
        reloading.until_equal()
        assert reloading.held()[700] == 6


def test_rows_that_were_read_stay_when_a_rewind_replaces_a_history(
    database: Database, there: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no log, so they would not come again, neither to the table nor to its shadow."""
    given = Reloading.destination.fget  # type: ignore[attr-defined]
    replacing = property(lambda each: given(each) | {"on_rewind": "replace"})
    monkeypatch.setattr(Reloading, "destination", replacing)
    reloading = loaded("postgres append", database, there, tmp_path)
    rig = reloading.rig
    rewind = "SELECT walbrook.rewind('files', to_earliest => true)"
    with rig.running():
        rig.rows(rewind)
        database.execute("UPDATE item SET version = 2 WHERE id = 600")
        reloading.until_equal()
        number = slowly(reloading)
        delivered = f"SELECT rows >= 1000 FROM walbrook.backfill_progress WHERE id = {number}"
        until("some rows", lambda: rig.rows(delivered) == [(True,)])
        rig.rows(rewind)
        database.execute("UPDATE item SET version = 2 WHERE id = 700")
        rig.until_delivered()
        rig.hurry()
        rig.until_state(number)
        reloading.until_equal()
        twice = "SELECT walbrook_lsn, walbrook_idx FROM item GROUP BY 1, 2 HAVING count(*) > 1"
        assert reloading.select(twice) == []


def test_a_paused_sink_goes_on_with_its_reload(
    database: Database, there: Database, tmp_path: Path
) -> None:
    reloading = loaded("postgres mirror", database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        reloading.go_wrong()
        number = slowly(reloading)
        rig.rows("SELECT walbrook.pause('files')")
        database.execute("UPDATE item SET version = 6 WHERE id = 700")
        rig.rows("SELECT walbrook.resume('files')")
        rig.until_state(number)
        reloading.until_equal()


STOPPABLE = pytest.mark.parametrize(
    "way", ["delta upsert", pytest.param("iceberg on_read", marks=pytest.mark.sinks)]
)


def _stopped(way: str, database: Database, there: Database, directory: Path) -> Reloading:
    """Its table has a column that cannot become what it is at the source, and a change waits."""
    reloading = loaded(way, database, there, directory)
    with reloading.rig.running():
        database.execute(
            "ALTER TABLE item ALTER body TYPE int USING length(body);"
            "UPDATE item SET version = 5 WHERE id = 9"
        )
        reloading.rig.until_delivered()
    assert reloading.held()[9] == 1
    return reloading


@STOPPABLE
def test_a_reload_lets_a_table_go_on_that_could_not_be_written(
    way: str, database: Database, there: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_tables, "RETRY_S", 0.0)
    reloading = _stopped(way, database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        number = slowly(reloading)
        database.execute(
            "UPDATE item SET version = 6 WHERE id = 10; DELETE FROM item WHERE id = 11"
        )
        rig.until_state(number)
        database.execute("UPDATE item SET version = 7 WHERE id = 12")
        reloading.until_equal()
    assert reloading.shadows() == []


@STOPPABLE
def test_changes_that_wait_for_a_table_outlive_a_cancelled_reload(
    way: str, database: Database, there: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_tables, "RETRY_S", 0.0)
    reloading = _stopped(way, database, there, tmp_path)
    rig = reloading.rig
    with rig.running():
        number = slowly(reloading)
        database.execute("UPDATE item SET version = 6 WHERE id = 10")
        rig.until_delivered()
        rig.rows(f"SELECT walbrook.cancel_backfill({number})")
        until("the shadow to go", lambda: not reloading.shadows())
        rig.until_delivered()
        assert (reloading.held()[9], reloading.held()[10]) == (1, 1)
        rig.backfilled("item", reload=True)
        reloading.until_equal()
