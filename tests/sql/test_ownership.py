"""The locks by which a service is the only one of its sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cdc.config import loads
from cdc.errors import OperatorError
from cdc.service.process.ownership import Ownership
from tests.fix_postgres import Database
from tests.walbrook_service import _url

_CONFIG = """
databases:
  - {{name: shop, url: {url}, slot: {{name: s}}, publication: {{name: p}}}}
sinks:
  - {{name: files, destination: {{type: file, path: files}}}}
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


def test_a_source_that_is_removed_can_be_served_by_another_service(
    ownership: Ownership, other: psycopg.Connection[tuple[object, ...]]
) -> None:
    ownership.add(["depot"])
    assert not takes(other, "depot")
    ownership.remove(["depot", "unknown"])
    assert takes(other, "depot")
    assert not takes(other, "shop")
