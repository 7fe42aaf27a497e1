"""The locks by which a service is the only one of its sources."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from cdc.config import loads
from cdc.errors import OperatorError
from cdc.service.live_config.file import ConfigFile
from cdc.service.process.ownership import Ownership
from cdc.service.serve import _stand_by
from cdc.stop import StopSignal
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import _url

_CONFIG = """
databases:
  - {{name: shop, url: {url}, slot: {{name: s}}, publication: {{name: p}}}}
sinks:
  - {{name: files, destination: {{type: file, path: files}}}}
"""
_STANDING_BY = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name = 'walbrook:standby' AND datname = current_database()
"""
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('walbrook.source.' || %s, 0))"


@pytest.fixture
def ownership(database: Database, tmp_path: Path) -> Iterator[Ownership]:
    with Ownership(loads(_CONFIG.format(url=_url(database.dsn)), tmp_path)) as held:
        yield held


@pytest.fixture
def other(database: Database) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """Another service."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield connection


def takes(other: psycopg.Connection[tuple[object, ...]], source: str) -> bool:
    row = other.execute(_LOCK, (source,)).fetchone()
    return row == (True,)


def test_sources_are_added_all_or_none(
    ownership: Ownership, other: psycopg.Connection[tuple[object, ...]]
) -> None:
    assert takes(other, "mill")
    with pytest.raises(OperatorError, match="another service serves source mill"):
        ownership.add(["depot", "mill"])
    assert takes(other, "depot"), "the first one is given back"
    assert not takes(other, "shop")


def test_a_standby_takes_over_with_the_file_as_it_is_then_and_the_locks_that_it_names(
    database: Database, other: psycopg.Connection[tuple[object, ...]], tmp_path: Path
) -> None:
    path, text = tmp_path / "walbrook.yaml", _CONFIG.format(url=_url(database.dsn))
    path.write_text(text)
    file, stop = ConfigFile.read(path), StopSignal()
    assert takes(other, "shop")
    assert takes(other, "depot")
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(_stand_by, file, None, stop)
        try:
            until("the standby", lambda: database.execute(_STANDING_BY) == [(1,)])
            # Meanwhile a configuration is applied that has another database.
            path.write_text(text.replace("name: shop", "name: depot"))
            other.execute("SELECT pg_advisory_unlock_all()")
            taken = waiting.result(30)
        finally:
            stop.request()
    assert taken is not None
    now, ownership = taken
    with ownership:
        assert now.sources == ["depot"]
        assert not takes(other, "depot")
        assert takes(other, "shop")


def test_a_source_that_is_removed_can_be_served_by_another_service(
    ownership: Ownership, other: psycopg.Connection[tuple[object, ...]]
) -> None:
    ownership.add(["depot"])
    assert not takes(other, "depot")
    ownership.remove(["depot", "unknown"])
    assert takes(other, "depot")
    assert not takes(other, "shop")
