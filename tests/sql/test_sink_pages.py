"""The pages of docs/sinks say what is so: their configurations are valid, their statements run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cdc.config import Config, loads
from cdc.state.consumers import Described
from tests.fix_postgres import Database
from tests.operators import Operator

pytestmark = pytest.mark.migrated

DOCS = Path(__file__).parents[2] / "docs" / "sinks"
PAGES = ("delta", "file", "iceberg", "parquet", "pull", "redis_stream", "webhook")
_DATABASE = {
    "name": "shop",
    "hostname": "h",
    "database": "d",
    "username": "u",
    "slot": {"name": "walbrook"},
    "publication": {"name": "walbrook"},
}
_TABLE = "UPDATE walbrook.consumers SET name = %s, destination = %s, rewind_ways = %s"


def _text(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def _config(page: str) -> Config:
    (block,) = re.findall(r"```yaml\n(.*?)```", _text(page), re.DOTALL)
    given = {"databases": [_DATABASE], **yaml.safe_load(block)}
    return loads(yaml.safe_dump(given), DOCS, {})


@pytest.mark.parametrize("page", PAGES)
def test_the_configuration_of_a_page_is_valid(page: str) -> None:
    (sink,) = _config(page).sinks
    assert sink.destination.type == page
    assert sink.rewind_ways == tuple(
        way for way in ("new_generation", "truncate") if f"**`{way}`**" in _text(page)
    )
    for row in ("idempotency", "order", "batch", "routing", "oversize", "defaults"):
        assert f"\n| {row} |" in _text(page)


@pytest.fixture
def operator(database: Database) -> Iterator[Operator]:
    with database.connect() as connection:
        yield Operator(database, connection)


@pytest.mark.parametrize("page", PAGES)
def test_every_statement_of_a_page_runs(page: str, operator: Operator) -> None:
    (sink,) = _config(page).sinks
    described = Described(sink.destination.type, rewind_ways=sink.rewind_ways)
    if page == "pull":
        described = Described("", rewind_ways=())  # its tables are made by its own tests
    operator.connection.execute(
        _TABLE + " WHERE name = 'other'",
        (sink.name, described.destination, list(described.rewind_ways)),
    )
    statements = re.findall(r"```sql\n(.*?)```", _text(page), re.DOTALL)
    assert statements
    for statement in "".join(statements).split(";\n"):
        if statement.strip():
            ((_, consumer, *_),) = operator.rows(statement)
            assert consumer == sink.name
