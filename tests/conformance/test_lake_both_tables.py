"""A history within seconds and current rows on an interval: the query that joins them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cdc.config import DeltaDestination, loads
from sinks.lakehouse import LakehouseSink, LakeNames
from sinks.lakehouse.delta import delta_tables
from tests.fix_postgres import Database
from tests.lake import query
from tests.slot_batches import SlotBatches, slot_batches

PAGE = Path(__file__).parents[2] / "docs" / "two-tables.md"
ROUNDS = 12
SETUP = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, status text, note text)",
    "ALTER TABLE orders ALTER note SET STORAGE EXTERNAL",
)


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    with slot_batches(database) as batches:
        yield batches


def _statement(rng: random.Random) -> str:
    key, other = rng.randrange(9), rng.randrange(9)
    note = rng.choice(["NULL", f"repeat('{rng.choice('abc')}', {rng.choice([3, 3000])})"])
    return rng.choice(
        [
            f"INSERT INTO orders VALUES ({key}, 'new', {note}) ON CONFLICT DO NOTHING",
            f"UPDATE orders SET status = 's{rng.randrange(9)}' WHERE id = {key}",
            f"UPDATE orders SET note = {note} WHERE id = {key}",
            f"UPDATE orders SET id = {other}, note = {note} || id WHERE id = {key} "
            f"AND NOT EXISTS (SELECT FROM orders WHERE id = {other})",
            f"DELETE FROM orders WHERE id = {key}",
            *(["TRUNCATE orders"] if rng.random() < 0.15 else []),
        ]
    )


def test_the_page_configures_a_history_and_current_rows() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    source = {"name": "shop", "url": "postgresql://h/d", "slot": {"name": "s"}}
    given = {"databases": [{**source, "publication": {"name": "p"}}], **yaml.safe_load(block)}
    changes, current = loads(yaml.safe_dump(given), PAGE.parent, {}).sinks
    assert isinstance(changes.destination, DeltaDestination)
    assert isinstance(current.destination, DeltaDestination)
    assert (changes.destination.mode, current.destination.mode) == ("append", "upsert")


def test_the_history_and_older_current_rows_together_are_the_source(
    source: SlotBatches, database: Database, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    (joined,) = re.findall(r"```sql\n(WITH recent AS .*?)```", PAGE.read_text(), re.DOTALL)
    history = LakehouseSink(
        delta_tables(str(tmp_path / "changes"), "shop/changes", {}), LakeNames(), mode="append"
    )
    current = LakehouseSink(
        delta_tables(str(tmp_path / "current"), "shop/current", {}), LakeNames(), mode="upsert"
    )
    source.run(*SETUP, "INSERT INTO orders VALUES (1, 'new', 'n')")
    batch = source.taken()
    assert current.deliver(batch).error is history.deliver(batch).error is None
    places = {name: tmp_path / name / "public" / "orders" for name in ("changes", "current")}
    late = []
    for _ in range(ROUNDS):
        source.run(*(_statement(rng) for _ in range(rng.randrange(1, 9))))
        new = source.read()
        if new is not None and len(new):
            assert history.deliver(new).error is None
            late.append(new)
        while late and rng.random() < 0.3:
            assert current.deliver(late.pop(0)).error is None
        here = database.execute("SELECT id, status, note FROM orders")
        assert sorted(query(joined, **places), key=repr) == sorted(here, key=repr)
