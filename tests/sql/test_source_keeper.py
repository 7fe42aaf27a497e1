"""One source of a service: made ready in the end, and watched for tables that its sinks lose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cdc.config import loads
from cdc.reach import UnreachableError, reach
from cdc.service.process import source_keeper
from cdc.service.process.prepare import patiently, prepare_state
from cdc.service.process.source_keeper import SourceKeeper, wait_for_sources
from cdc.stop import StopSignal
from tests.fix_postgres import Database
from tests.proxy import Proxy
from tests.waiting import until
from tests.walbrook_service import _url

CONFIG = """
databases:
  - name: shop
    url: {url}
    slot: {{name: {slot}, create_if_not_exists: true}}
    publication: {{name: pub, create_if_not_exists: true}}
  - name: depot
    url: postgres://u:p@127.0.0.1:1/d
    slot: {{name: s}}
    publication: {{name: p}}
state: {{url: {state}}}
sinks:
  - name: named
    database: shop
    source: {{include_tables: [public.a, public.b]}}
    destination: {{type: file, path: named}}
  - name: all
    database: shop
    destination: {{type: file, path: all}}
"""


@contextmanager
def kept(database: Database, directory: Path, name: str, url: str = "") -> Iterator[SourceKeeper]:
    """A keeper of one of the two databases, which looks often."""
    own = _url(database.dsn)
    text = CONFIG.format(url=url or own, state=own, slot=f"slot_{database.name}")
    config = loads(text, directory)
    prepare_state(config)
    keeper = SourceKeeper(config, config.database(name), look_s=0.05)
    try:
        yield keeper
    finally:
        keeper.close()


def events(database: Database) -> list[tuple[Any, ...]]:
    return database.execute("SELECT source, consumer, kind FROM walbrook.health ORDER BY 1, 2")


def test_a_wrong_password_names_the_source_that_also_holds_the_state(tmp_path: Path) -> None:
    away = "postgres://u:p@127.0.0.1:1/d"
    text = CONFIG.format(url=away, state=away, slot="s")
    with pytest.raises(UnreachableError, match="the state database cannot be reached"):
        prepare_state(loads(text, tmp_path))
    without = text.replace(f"state: {{url: {away}}}\n", "")
    with pytest.raises(UnreachableError, match="database shop, which also holds the state, cannot"):
        prepare_state(loads(without, tmp_path))


def test_a_sink_that_loses_a_table_says_which(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    with kept(database, tmp_path, "shop") as keeper:
        until("a term", lambda: keeper.term)
        assert events(database) == []
        database.execute("ALTER TABLE b RENAME TO c")
        until("the event", lambda: events(database) == [("shop", "named", "tables_missing")])
        ((what,),) = database.execute("SELECT what FROM walbrook.health")
        assert what.endswith("does not publish: The table public.b does not exist")
        database.execute("ALTER TABLE c RENAME TO b")
        until("its end", lambda: events(database) == [])

        database.execute(
            "ALTER PUBLICATION pub DROP TABLES IN SCHEMA public; ALTER PUBLICATION pub ADD TABLE a"
        )
        lost = [("shop", "all", "tables_unpublished"), ("shop", "named", "tables_missing")]
        until("both events", lambda: events(database) == lost)
        ((what,),) = database.execute("SELECT what FROM walbrook.health WHERE consumer = 'all'")
        assert what.startswith("all gets no more changes of public.b: ")
        database.execute("ALTER PUBLICATION pub ADD TABLE b")
        until("their end", lambda: events(database) == [])


def test_a_source_that_does_not_answer_is_served_once_it_does(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    with Proxy("host=127.0.0.1 port=1") as proxy:
        url = _url(proxy.dsn(database.dsn))
        with kept(database, tmp_path, "shop", url) as keeper:
            until("a try", lambda: keeper.has_tried)
            assert (keeper.term, type(keeper.error)) == (None, UnreachableError)
            assert events(database) == [("shop", None, "source_not_ready")]
            proxy.retarget(database.dsn)
            until("a term", lambda: keeper.term)
            assert keeper.error is None


def test_an_error_without_a_known_cause_is_shown_without_what_it_quotes(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_given: object) -> int:
        raise ValueError("no number: Gwendolen-4711")

    monkeypatch.setattr(source_keeper, "prepare_database", breaks)
    with kept(database, tmp_path, "shop") as keeper:
        until("a try", lambda: keeper.has_tried)
    ((error, what),) = database.execute(
        "SELECT s.last_error, h.what FROM walbrook.sources s, walbrook.health h"
    )
    for shown in (error, what):
        assert "ValueError" in shown
        assert "Gwendolen" not in shown


def test_a_start_without_any_source_that_is_ready_is_refused(
    database: Database, tmp_path: Path
) -> None:
    with (
        kept(database, tmp_path, "depot") as keeper,
        pytest.raises(UnreachableError, match="database depot cannot be reached"),
    ):
        wait_for_sources([keeper], StopSignal())


def test_a_connection_that_is_cut_during_the_start_is_made_again(database: Database) -> None:
    tries = []

    def step() -> int:
        tries.append(1)
        with reach(database.dsn, "the state database") as connection:
            if len(tries) == 1:
                connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return len(tries)

    assert patiently(step, StopSignal()) == 2


def test_a_database_that_cannot_be_reached_at_all_ends_the_start_at_once() -> None:
    with pytest.raises(UnreachableError):
        patiently(lambda: reach("host=127.0.0.1 port=1", "the state database"), StopSignal())


def test_a_queue_that_drops_no_more_has_no_event_without_requests(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY)")
    with kept(database, tmp_path, "shop") as keeper:
        until("a term", lambda: keeper.term)
        database.execute(
            "UPDATE walbrook.consumers SET destination = 'pull' WHERE name = 'all';"
            "INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, seen_at) "
            "VALUES ('shop', 'all', 'records_dropped', 'warning', 'x', now() - interval '1 hour')"
        )
        until("its end", lambda: ("shop", "all", "records_dropped") not in events(database))
