"""Random histories in random cuts: a mirror equals the source, and a history has every change."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cdc.change import MessageBatch
from sinks.postgres import PostgresSink
from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.slot_batches import SlotBatches, cut, slot_batches

ROUNDS = 25
TABLES = ("item", "pair", "bag")
SCHEMA = """
CREATE TABLE item (id int PRIMARY KEY, n numeric, big text, other text);
ALTER TABLE item ALTER big SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL;
CREATE TABLE pair (a int, b text, big text, PRIMARY KEY (b, a));
ALTER TABLE pair ALTER big SET STORAGE EXTERNAL;
CREATE TABLE bag (x int, y text);
ALTER TABLE bag REPLICA IDENTITY FULL;
"""


@pytest.fixture
def source(database: Database) -> Iterator[SlotBatches]:
    database.execute(SCHEMA)
    with slot_batches(database) as batches:
        yield batches


@pytest.fixture
def destination(postgres_server: PostgresServer) -> Iterator[Database]:
    with fresh_database(postgres_server.dsn) as made:
        yield made


class Writer:
    """Writes random statements; what a statement finds no row for does nothing."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def transaction(self) -> str:
        return "; ".join(self.statement() for _ in range(self.rng.randrange(1, 8)))

    def statement(self) -> str:
        table = self.rng.choices(TABLES, [5, 3, 2])[0]
        return {"item": self.item, "pair": self.pair, "bag": self.bag}[table]()

    def item(self) -> str:
        key, other = self.rng.randrange(8), self.rng.randrange(8)
        return self.rng.choice(
            [
                f"INSERT INTO item VALUES ({key}, {self.number()}, {self.big()}, {self.big()}) "
                "ON CONFLICT (id) DO UPDATE SET n = excluded.n, big = excluded.big",
                f"INSERT INTO item VALUES ({key}, {self.number()}, {self.big()}, {self.big()}) "
                "ON CONFLICT DO NOTHING",
                f"UPDATE item SET n = {self.number()} WHERE id = {key}",
                f"UPDATE item SET other = {self.big()} WHERE id = {key}",
                f"UPDATE item SET id = {other}, n = {self.number()} WHERE id = {key} "
                f"AND NOT EXISTS (SELECT FROM item WHERE id = {other})",
                f"UPDATE item SET id = {other}, big = {self.big()}, other = NULL WHERE id = {key} "
                f"AND NOT EXISTS (SELECT FROM item WHERE id = {other})",
                "UPDATE item SET id = id + 100, n = 7 WHERE id < 100 "
                "AND NOT EXISTS (SELECT FROM item WHERE id >= 100)",
                "UPDATE item SET id = id - 100 WHERE id >= 100 "
                "AND NOT EXISTS (SELECT FROM item WHERE id < 100)",
                f"DELETE FROM item WHERE id = {key}",
                *(["TRUNCATE item"] if self.rng.random() < 0.2 else []),
            ]
        )

    def pair(self) -> str:
        a, b = self.rng.randrange(3), self.rng.choice("xy")
        return self.rng.choice(
            [
                f"INSERT INTO pair VALUES ({a}, '{b}', {self.big()}) ON CONFLICT (b, a) "
                "DO UPDATE SET big = excluded.big",
                f"UPDATE pair SET b = 'z{b}' WHERE a = {a} AND b = '{b}' "
                f"AND NOT EXISTS (SELECT FROM pair WHERE (a, b) = ({a}, 'z{b}'))",
                f"DELETE FROM pair WHERE a = {a}",
                *(["TRUNCATE pair, item"] if self.rng.random() < 0.1 else []),
            ]
        )

    def bag(self) -> str:
        x, y = self.rng.choice(["1", "2", "NULL"]), self.rng.choice(["'a'", "E'\\t\\\\N'", "NULL"])
        return self.rng.choice(
            [
                f"INSERT INTO bag SELECT {x}, {y} FROM generate_series(1, 2)",
                f"UPDATE bag SET y = {y} WHERE ctid = (SELECT min(ctid) FROM bag)",
                "DELETE FROM bag WHERE ctid = (SELECT max(ctid) FROM bag)",
                f"DELETE FROM bag WHERE x = {x}",
                *(["TRUNCATE bag"] if self.rng.random() < 0.1 else []),
            ]
        )

    def number(self) -> str:
        return self.rng.choice(["NULL", "1.50", "'NaN'", str(self.rng.randrange(100))])

    def big(self) -> str:
        length = self.rng.choice([0, 3, 2500])
        return self.rng.choice(["NULL", f"repeat('{self.rng.choice('abc')}', {length})"])


def rows_of(database: Database, table: str, schema: str) -> list[str]:
    found = database.execute(f"SELECT t::text FROM {schema}.{table} t ORDER BY 1")
    return [row[0] for row in found]


def delivered(sink: PostgresSink, batch: MessageBatch) -> None:
    delivery = sink.deliver(batch)
    assert delivery.error is None, delivery.error.full_text
    assert delivery.settled == len(batch)


def test_a_mirror_equals_the_source_after_every_history_in_every_cut(
    database: Database, source: SlotBatches, destination: Database
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    writer = Writer(seed)
    sink = PostgresSink(
        destination.dsn, source="shop", consumer="orders", table="{table}", target_schema="copy"
    )
    for _ in range(ROUNDS):
        for _ in range(writer.rng.randrange(1, 12)):
            source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        batch = source.read()
        if batch is None:
            continue
        for piece in cut(batch, writer.rng, writer.rng.choice([1, 2, 5, 1000])):
            delivered(sink, piece)
        seen = set(batch.rows.column("table_name").to_pylist())
        for table in seen:
            assert rows_of(destination, table, "copy") == rows_of(database, table, "public"), table
    sink.close()


def test_a_history_has_every_change_in_order_with_the_values_of_its_row(
    source: SlotBatches, destination: Database
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    writer = Writer(seed)
    sink = PostgresSink(destination.dsn, source="shop", consumer="orders", mode="append")
    expected: dict[str, list[tuple[object, ...]]] = {table: [] for table in TABLES}
    for _ in range(ROUNDS // 2):
        for _ in range(writer.rng.randrange(1, 12)):
            source.run(f"BEGIN; {writer.transaction()}; COMMIT")
        batch = source.read()
        if batch is None:
            continue
        for row in batch.rows.to_pylist():
            said = (row["commit_lsn"], row["commit_idx"], row["action"], row["record"])
            expected[row["table_name"]].append(said)
        for piece in cut(batch, writer.rng, writer.rng.choice([1, 2, 1000])):
            delivered(sink, piece)
    sink.close()
    columns = {"item": ("id", "n", "big", "other"), "pair": ("a", "b", "big"), "bag": ("x", "y")}
    for table, rows in expected.items():
        if not rows:
            continue
        found = destination.execute(
            "SELECT (walbrook_lsn - '0/0')::bigint, walbrook_idx, walbrook_action, "
            f"walbrook_unchanged, to_jsonb(t) FROM {table} t ORDER BY walbrook_lsn, walbrook_idx"
        )
        assert [row[:3] for row in found] == [row[:3] for row in rows]
        for (*_, unchanged, values), (_, _, action, record) in zip(found, rows, strict=True):
            had = {name: values[name] for name in columns[table] if name not in (unchanged or [])}
            assert had == _as_jsonb(destination, record, action, columns[table])


def _as_jsonb(
    database: Database, record: object, action: object, columns: tuple[str, ...]
) -> dict[str, object]:
    """The record as the destination reads JSON; a truncate has no values."""
    if action == "truncate":
        return dict.fromkeys(columns)
    with database.connect() as connection:
        row = connection.execute("SELECT %s::jsonb", (record,)).fetchone()
    assert row is not None
    found: dict[str, object] = row[0]
    return found
