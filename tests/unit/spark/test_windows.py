"""Windows over event time: which windows close, and what their results say."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import yaml
from pyspark.sql import SparkSession

from cdc.decoding import decode_changes
from cdc.decoding.plan import plan_for
from cdc.errors import ConfigError, ExpressionError, TransientError
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.eventtime.windows import run as window_run
from spark_pipeline.eventtime.windows.aggregate import (
    RESULT_SCHEMA,
    WindowAggregator,
    WindowSpec,
    last_window_end,
)
from spark_pipeline.eventtime.windows.check import check_window
from spark_pipeline.expressions import failures
from tests import pgoutput
from tests.exact_json import as_values, parse
from tests.pgoutput import Values
from tests.unit.decoding.frames import Frame

PAGE = (Path(__file__).parents[3] / "docs" / "windows.md").read_text()
ORIGINS = [Origin("shop", "h", "d"), Origin("other", "h", "d")]
NO_TIME = np.iinfo(np.int64).min
S = 1_000_000
_TYPMOD_10_2 = (10 << 16 | 2) + 4
COLUMNS: list[pgoutput.ColumnSpec] = [
    ("id", 20, True),
    ("region", 25),
    ("amount", 1700),
    ("price", 701),
    ("at", 1184),
    ("ok", 16),
    ("n", 23),
]
ORDERS = pgoutput.relation(1, "public", "orders", COLUMNS, typmod=_TYPMOD_10_2)
LOOSE = pgoutput.relation(2, "public", "loose", [("id", 20, True), ("exact", 1700), ("doc", 3802)])
TEXTS = pgoutput.relation(3, "public", "texts", [("id", 20, True), ("amount", 25), ("n", 23)])
TABLES = {"shop": [plan_for(ORDERS), plan_for(LOOSE)]}


def order(number: int, **given: str | None) -> Values:
    row: dict[str, str | None] = {"id": str(number), "region": "eu", "n": "1"}
    return [(row | given).get(column[0]) for column in COLUMNS]


def changes(*rows: Values, relation: bytes = ORDERS) -> pa.RecordBatch:
    """Inserts of these rows, as decode gives them."""
    frame = Frame()
    oid = plan_for(relation).relation.oid
    for row in rows:
        frame.add(pgoutput.insert(oid, row), relation, oid=oid)
    return decode_changes(frame.batch(), frame.schemas)


def spec(
    aggregates: Mapping[str, str],
    group_by: Mapping[str, str] | None = None,
    *,
    size: int = 10 * S,
    slide: int | None = None,
) -> WindowSpec:
    return WindowSpec(size, slide or size, group_by or {}, aggregates)


def windows(spark: SparkSession, given: WindowSpec, **tables: Any) -> WindowAggregator:
    return WindowAggregator(spark, "orders", given, tables or TABLES, ORIGINS)


def read(text: str) -> Any:
    return as_values(parse(text))


def joined(*batches: pa.RecordBatch) -> pa.RecordBatch:
    """Changes of several tables, each with a cursor of its own."""
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    at = whole.schema.get_field_index("commit_idx")
    cursors = pa.array(range(whole.num_rows), pa.int64())
    return whole.set_column(at, whole.schema.field(at), cursors)


def test_the_example_of_the_page_gives_what_the_page_says(spark: SparkSession) -> None:
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    (sink,) = yaml.safe_load(blocks["yaml"])["sinks"]
    assert sink["window"]["size"] == "1m"
    columns: list[pgoutput.ColumnSpec] = [
        ("id", 20, True),
        ("region", 25),
        ("amount", 1700),
        ("placed_at", 1184),
    ]
    relation = pgoutput.relation(1, "public", "orders", columns, typmod=_TYPMOD_10_2)
    inserted = re.findall(r"VALUES \((.*)\);", blocks["sql"])
    rows = changes(*(_values(line) for line in inserted), relation=relation)
    records = map(orjson.loads, rows.column("record").to_pylist())
    times = [int(datetime.fromisoformat(record["placed_at"]).timestamp()) * S for record in records]
    given = WindowSpec(60 * S, 60 * S, sink["window"]["group_by"], sink["window"]["aggregates"])
    made = windows(spark, given, shop=[plan_for(relation)])
    results = made.close(rows, np.array(times), (NO_TIME, max(times) + 60 * S)).results
    assert [read(text) for text in results.column("record").to_pylist()] == as_values(
        parse(blocks["json"])
    )


def _values(line: str) -> Values:
    return [None if text == "NULL" else text.strip("'") for text in line.split(", ")]


@pytest.mark.parametrize(
    ("time", "size", "slide", "end"),
    [
        (0, 10, 10, 10),
        (9, 10, 10, 10),
        (10, 10, 10, 20),
        (-1, 10, 10, 0),
        (-10, 10, 10, 0),
        (-11, 10, 10, -10),
        (0, 10, 5, 10),
        (7, 10, 5, 15),
        (-1, 10, 5, 5),
        (NO_TIME, 10, 5, NO_TIME),
    ],
)
def test_the_last_window_of_a_time(time: int, size: int, slide: int, end: int) -> None:
    assert last_window_end(np.array([time]), size, slide).tolist() == [end]


def test_a_size_that_is_no_multiple_of_its_slide_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot slide by 3 us"):
        WindowSpec(10, 3, {}, {"n": "count(*)"})


def test_results_are_those_of_a_plain_count_however_windows_close(spark: SparkSession) -> None:
    size, slide = 10 * S, 5 * S
    random = np.random.default_rng(7)
    count = 400
    times = random.integers(-30 * S, 30 * S, count)
    times[:4] = [NO_TIME, -10 * S, 10 * S, 10 * S - 1]
    regions = random.choice(np.array(["eu", "us", 'a"b', None]), count)
    amounts = [f"{value / 100:.2f}" for value in random.integers(-1000, 1000, count)]
    rows = changes(*(order(n, region=regions[n], amount=amounts[n]) for n in range(count)))
    expected: dict[tuple[int, str | None], list[Decimal]] = defaultdict(list)
    for n in range(1, count):
        first = int(times[n]) // slide * slide
        for start in range(first - size + slide, first + 1, slide):
            expected[start, regions[n]].append(Decimal(amounts[n]))

    made = windows(
        spark,
        spec(
            {"orders": "count(*)", "total": "sum(record.amount)", "most": "max(record.amount)"},
            {"region": "record.region"},
            size=size,
            slide=slide,
        ),
    )
    at_once = made.close(rows, times, (NO_TIME, 60 * S)).results
    assert at_once.schema == RESULT_SCHEMA
    bounds = [NO_TIME, -1, 60 * S]
    pieces = [made.close(rows, times, closing).results for closing in pairwise(bounds)]
    assert pa.Table.from_batches(pieces).combine_chunks().to_batches()[0].equals(at_once)

    found = {}
    for row in at_once.to_pylist():
        record = read(row["record"])
        assert row["window_end"] - row["window_start"] == size
        found[row["window_start"], record["region"]] = record
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key]["orders"] == len(values)
        assert found[key]["total"] == sum(values)
        assert found[key]["most"] == max(values)
    keys = [
        (row["window_end"], orjson.dumps(orjson.loads(row["record"])["region"]))
        for row in at_once.to_pylist()
    ]
    assert keys == sorted(keys)


def test_a_window_closes_when_the_watermark_has_reached_its_last_microsecond(
    spark: SparkSession,
) -> None:
    made = windows(spark, spec({"n": "count(*)"}))
    rows, times = changes(order(1)), np.array([3 * S])
    assert made.close(rows, times, (NO_TIME, 10 * S - 2)).results.num_rows == 0
    (row,) = made.close(rows, times, (10 * S - 2, 10 * S - 1)).results.to_pylist()
    assert made.close(rows, times, (10 * S - 1, 99 * S)).results.num_rows == 0
    assert row == {
        "window_start": 0,
        "window_end": 10 * S,
        "record": '{"window_start":"1970-01-01T00:00:00.000000Z",'
        '"window_end":"1970-01-01T00:00:10.000000Z","n":1}',
    }
    none = made.close(rows.slice(0, 0), times[:0], (NO_TIME, 10 * S)).results
    assert none.schema == RESULT_SCHEMA
    assert none.num_rows == 0


def test_the_same_rows_give_the_same_results_in_whatever_order_and_on_how_many_cores(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    count = 1_000
    rows = changes(
        *(
            order(n, region=str(n % 7), price=repr(float(value)))
            for n, value in enumerate(
                random.normal(size=count) * 10.0 ** random.integers(-9, 9, count)
            )
        )
    )
    times = random.integers(0, 20 * S, count)
    asked = {
        "s": "sum(record.price)",
        "d": "stddev(record.price)",
        "p": "percentile_approx(record.price, 0.5)",
        "l": "max_by(record.id, record.n)",
    }
    made = windows(spark, spec(asked, {"region": "record.region"}, slide=5 * S))
    once = made.close(rows, times, (NO_TIME, 60 * S)).results
    assert once.num_rows > 7
    order_of = random.permutation(count)
    monkeypatch.setattr(window_run, "PARTITION_ROWS", 100)
    again = made.close(rows.take(pa.array(order_of)), times[order_of], (NO_TIME, 60 * S)).results
    assert again.equals(once)


def test_numbers_are_exact_and_values_written_as_elsewhere(spark: SparkSession) -> None:
    at = "2026-01-02 03:04:05.6+00"
    rows = joined(
        changes(
            order(2**62, amount="99999999.99", price="NaN", at=at, ok="t", region='a"\n'),
            order(2**62 - 1, amount="0.01", price="1.5", region="b"),
            order(-5, amount=None, price=None),
        ),
        changes(
            ["0", "9007199254740993.123456789", '{"k": "a"}'],
            ["0", "0.000000001", '{"k":"a"}'],
            relation=LOOSE,
        ),
    )
    asked = {
        "total": "sum(record.amount)",
        "exact": "sum(cast(record.exact AS decimal(38, 9)))",
        "ids": "sum(record.id)",
        "big": "max(record.id)",
        "none": "sum(CASE WHEN record.id < 0 THEN record.amount END)",
        "tiny": "sum(cast(0 AS decimal(38, 9)))",
        "price": "sum(record.price)",
        "seen": "count(record.amount)",
        "first": "min(record.at)",
        "day": "max(date(record.at))",
        "pair": "struct(max(record.ok) AS ok, count(*) AS n)",
        "mean": "avg(record.n)",
        "text": "min(record.region)",
        "kind": "max(get_json_object(record.doc, '$.k'))",
        "table": "max(metadata.table_name)",
    }
    made = windows(spark, spec(asked, {"by": "action"}))
    (row,) = made.close(rows, np.zeros(5, np.int64), (NO_TIME, 10 * S)).results.to_pylist()
    _, _, said = row["record"].partition('"1970-01-01T00:00:10.000000Z",')
    assert said == (
        '"by":"insert","total":100000000.00,"exact":9007199254740993.123456790,'
        f'"ids":{2**63 - 6},"big":{2**62},"none":null,"tiny":0.000000000,"price":"NaN","seen":2,'
        '"first":"2026-01-02T03:04:05.600000Z","day":"2026-01-02","pair":{"ok":true,"n":5},'
        '"mean":1.0,"text":"a\\"\\n","kind":"a","table":"orders"}'
    )


def test_a_change_that_cannot_be_read_or_judged_is_reported_and_left_out(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = windows(spark, spec({"n": "count(*)", "s": "sum(100 div record.n)"}))
    rows = changes(order(1, n="2"), order(2, n="0"), order(3, n="5"), order(4, n="0"))
    times = np.array([4, 3, 2, 90]) * S
    closed = made.close(rows, times, (NO_TIME, 10 * S))
    (record,) = map(orjson.loads, closed.results.column("record").to_pylist())
    assert (record["n"], record["s"]) == (2, 70)
    assert list(closed.bad) == [1]  # the other bad one is in a window that has not closed
    assert closed.bad[1].startswith("cannot judge the change at 16/100:1 of table public.orders: ")
    assert "Division by zero" in closed.bad[1]
    altered = pgoutput.relation(1, "public", "orders", [*COLUMNS[:-1], ("n", 20)])
    larger = changes(order(1, n="2"), order(2, n=str(2**40)), relation=altered)
    closed = made.close(larger, times[:2], (NO_TIME, 10 * S))
    assert orjson.loads(closed.results.column("record")[0].as_py())["s"] == 50
    assert closed.bad == {
        1: "cannot read the change at 16/100:1 of table public.orders: column n: this value is "
        "beyond the range of its type"
    }
    monkeypatch.setattr(failures, "BAD_ROWS_MAX", 0)
    with pytest.raises(TransientError, match="fail on more than 0 changes"):
        made.close(rows, times, (NO_TIME, 10 * S))


def test_an_aggregate_that_fails_over_a_group_leaves_out_no_group(spark: SparkSession) -> None:
    made = windows(spark, spec({"s": "sum(record.id)", "r": "sum(record.n) / (count(*) - 2)"}))
    for ids, says in (
        ([2**62, 2**62, 2**62], "ARITHMETIC_OVERFLOW"),
        ([1, 2], "DIVIDE_BY_ZERO"),
    ):
        rows = changes(*map(order, ids))
        with pytest.raises(TransientError, match=f"window of consumer orders.*{says}"):
            made.close(rows, np.zeros(len(ids), np.int64), (NO_TIME, 10 * S))


def test_changes_of_several_tables_and_databases_are_in_one_window(spark: SparkSession) -> None:
    made = windows(
        spark,
        spec(
            {"n": "count(*)", "regions": "count(record.region)"},
            {"database": "metadata.database_name"},
        ),
        shop=[plan_for(ORDERS)],
        other=[plan_for(TEXTS)],
    )
    rows = joined(changes(order(1)), changes(["1", "x", "2"], ["2", "y", "3"], relation=TEXTS))
    sources = np.array([0, 1, 1], np.int16)
    results = made.close(rows, np.zeros(3, np.int64), (NO_TIME, 10 * S), sources).results
    records = [orjson.loads(text) for text in results.column("record").to_pylist()]
    said = [(one["database"], one["n"], one["regions"]) for one in records]
    assert said == [("other", 2, 0), ("shop", 1, 1)]


def test_settings_of_the_operators_session_change_nothing(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        made = windows(spark, spec({"s": "sum(100 div record.n)"}))
        closed = made.close(changes(order(1, n="0")), np.zeros(1, np.int64), (NO_TIME, 10 * S))
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")
    assert list(closed.bad) == [0]


def problems(spark: SparkSession, given: WindowSpec, **tables: Any) -> list[str]:
    found = check_window(spark, "orders", given, tables or TABLES)
    return [what for what, fix in [*found.of_form, *found.of_tables] if fix]


def test_aggregates_of_many_kinds_are_taken(spark: SparkSession) -> None:
    asked = [
        "count(*)",
        "sum(record.amount) FILTER (WHERE record.ok)",
        "round(avg(record.amount), 2)",
        "stddev_samp(record.price) + var_pop(record.price)",
        "percentile_cont(0.5) WITHIN GROUP (ORDER BY record.price)",
        "every(record.ok) OR any(record.ok)",
        "CASE WHEN count(*) > 1 THEN 'many' ELSE 'one' END",
        "sum(cast(record.exact AS decimal(38, 9)))",
        "count_if(action = 'insert')",
        "sum(cast(record.exact AS double))",
        *(f"{name}(record.n)" for name in ("approx_count_distinct", "median", "std")),
        *(f"{name}(record.price, record.n)" for name in ("max_by", "regr_sxx")),
    ]
    given = spec({f"a{at}": text for at, text in enumerate(asked)}, {"r": "upper(record.region)"})
    assert problems(spark, given) == []


REFUSED = [
    ("record.amount", "it aggregates nothing"),
    ("1 + 1", "it aggregates nothing"),
    ("record.amount + count(*)", "stands outside of its aggregates"),
    ("first(record.id)", "the order of the changes"),
    ("collect_list(record.id)", "the order of the changes"),
    ("any_value(record.id)", "the order of the changes"),
    ("mode(record.id)", "the order of the changes"),
    ("listagg(record.region)", "the order of the changes"),
    ("sum(rand())", "may say something else"),
    ("max(now())", "may say something else"),
    ("max(current_timestamp)", "may say something else"),
    ("sum(count(*))", "AGGREGATE"),
    ("sum(record.n) OVER ()", "window functions are refused"),
    ("count(*) + (SELECT 1)", "subqueries are refused"),
    ("max(explode(array(1)))", "the function explode is refused"),
    ("max(current_user())", "is refused"),
    ("count(*) AS n", "leave out AS"),
    ("sum(record.amout)", "did you mean amount?"),
    ("sum(record.nothing)", "No such struct field `nothing`"),
    ("sum(metadata.commit_lns)", "did you mean commit_lsn?"),
    ("count(`~rank`)", "UNRESOLVED_COLUMN"),
    ("sum(record.exact)", "would make 64-bit floats of the texts"),
    ("max(record.exact)", "would compare the numbers"),
    ("min_by(record.id, record.exact)", "would compare the numbers"),
    ("sum(1 div 0)", "Division by zero"),
    ("sum(", "Syntax error"),
]


def test_aggregates_that_may_not_be_are_refused_each_with_its_reason(spark: SparkSession) -> None:
    asked = {f"a{at}": text for at, (text, _) in enumerate(REFUSED)}
    told = {what.split()[0]: what for what in problems(spark, spec(asked))}
    for at, (text, says) in enumerate(REFUSED):
        what = told.get(f"aggregates.a{at}", "")
        assert says in what, text
        assert "of the window of consumer orders cannot be used" in what
    with pytest.raises(
        ExpressionError, match=r"aggregates\.a of the window.*did you mean n\?"
    ) as caught:
        windows(spark, spec({"a": "sum(record.nn)"}))
    assert "correct it in the configuration" in caught.value.fix


def test_the_values_grouped_by_are_of_one_change(spark: SparkSession) -> None:
    refused = [
        ("count(*)", "it may look at one change alone"),
        ("record.regoin", "did you mean region?"),
        ("rand()", "may say something else"),
        ("window(record.at, '1 minute')", "it may look at one change alone"),
    ]
    asked = {f"g{at}": text for at, (text, _) in enumerate(refused)}
    found = problems(spark, spec({"n": "count(*)"}, asked))
    told = {what.split()[0]: what for what in found}
    for at, (text, says) in enumerate(refused):
        assert says in told[f"group_by.g{at}"], text


def test_a_column_that_cannot_be_grouped_by_is_refused(spark: SparkSession) -> None:
    (what,) = problems(spark, spec({"n": "count(*)"}, {"g": "map(record.id, 1)"}))
    assert what.startswith("the window of consumer orders cannot be used on its tables: ")


def test_a_column_has_one_type_over_all_tables(spark: SparkSession) -> None:
    tables = {"shop": [plan_for(ORDERS)], "other": [plan_for(TEXTS)]}
    (what,) = problems(spark, spec({"s": "sum(record.amount)"}), **tables)
    assert (
        "the column amount is decimal(10,2) in table public.orders of database shop but string in "
        "table public.texts of database other"
    ) in what
    assert problems(spark, spec({"s": "sum(record.n)"}), **tables) == []


def test_every_problem_is_reported_at_once_and_without_tables_those_of_form(
    spark: SparkSession,
) -> None:
    given = spec({"a": "sum(record.nope)", "b": "rand()"}, {"g": "record.nope"})
    assert len(problems(spark, given)) == 3
    found = check_window(spark, "orders", given, None)
    assert [what.split()[0] for what, _ in found.of_form] == ["aggregates.b"]
    assert found.of_tables == []
