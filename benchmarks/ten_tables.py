"""Ten tables of different columns whose rows come in turns: the worst neighbourhood for columns.

Each table has eight to twelve columns of its own types, in its own order, and a row takes about as
many bytes as one of ``orders``.
"""

from __future__ import annotations

from benchmarks.source import BenchmarkSource, WrittenRows

TEN_TABLES = "benchmark_ten_tables"
"""The publication of all ten."""

_KINDS = {
    "integer": "(i % 10007)::integer",
    "numeric": "round((i % 100000) / 100.0, 2)",
    "text": "'left with the neighbour at number ' || i % 131",
    "timestamptz": "timestamptz '2026-01-01 00:00:00.123456+00' + i * interval '1 second'",
    "boolean": "i % 2 = 0",
    "jsonb": "jsonb_build_object('sku', 'A-' || i % 977, 'count', i % 9)",
    "date": "date '2026-01-01' + (i % 365)::integer",
    "bigint": "i::bigint * 1000003",
}
_FILL = """
CREATE PROCEDURE fill_ten_tables(first bigint, last bigint) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN first..last LOOP
        CASE i % 10 {branches} END CASE;
    END LOOP;
END $$
"""


def create_ten_tables(source: BenchmarkSource) -> None:
    """The tables, their publication, and what fills them."""
    branches = []
    for number in range(10):
        kinds = _kinds_of(number)
        columns = ", ".join(f"c{at}_{number} {kind}" for at, kind in enumerate(kinds))
        source.run(f"CREATE TABLE ten_{number} (id bigint PRIMARY KEY, {columns})")
        values = ", ".join(_KINDS[kind] for kind in kinds)
        branches.append(f"WHEN {number} THEN INSERT INTO ten_{number} SELECT i, {values};")
    source.run(_FILL.format(branches=" ".join(branches)))
    tables = ", ".join(f"ten_{number}" for number in range(10))
    source.run(f"CREATE PUBLICATION {TEN_TABLES} FOR TABLE {tables}")


def load_ten_tables(source: BenchmarkSource, rows: int, transaction_rows: int) -> WrittenRows:
    """Write ``rows`` rows, each into the next table, and the one that follows."""
    for start in range(0, rows, transaction_rows):
        end = min(start + transaction_rows, rows) - 1
        source.run(f"CALL fill_ten_tables({start}, {end})")
    return source.ended(rows, f"CALL fill_ten_tables({rows}, {rows})", TEN_TABLES)


def _kinds_of(number: int) -> list[str]:
    """Between seven and eleven columns, beginning at another kind in each table."""
    kinds = list(_KINDS)
    turned = kinds[number % len(kinds) :] + kinds[: number % len(kinds)]
    return [*turned, "integer", "boolean", "date"][: 7 + number % 5]
