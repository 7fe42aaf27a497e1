"""Verdicts over real changes, by the real Spark: what passes, what is sent, where, what fails."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.errors import ExpressionError, TransientError
from spark_pipeline.delivery.verdicts import VERDICT_SCHEMA
from spark_pipeline.expressions.evaluate import verdicts
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.frames import COMMIT_LSN, OID, Frame, table
from tests.unit.expressions.tables import (
    FILE,
    FULL,
    ORDERS,
    ORIGIN,
    REDIS,
    WEBHOOK,
    consumer,
    order,
    orders,
    raw,
)

FUNCTIONS = "python:tests.unit.expressions.operators_functions"


def judged(
    spark: SparkSession, sink: SinkConfig, frame: Frame, annotations: list[str | None] | None = None
) -> list[dict[str, Any]]:
    found = verdicts(spark, sink, ORIGIN, raw(frame, annotations))
    assert found.schema == VERDICT_SCHEMA
    found.validate(full=True)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def kept(spark: SparkSession, text: str, frame: Frame) -> list[bool]:
    return [row["keep"] for row in judged(spark, consumer(filter=text), frame)]


def sent(
    spark: SparkSession, text: str, frame: Frame, annotations: list[str | None] | None = None
) -> list[Any]:
    rows = judged(spark, consumer(transform=text), frame, annotations)
    assert [row["error"] for row in rows] == [None] * len(rows)
    return [json.loads(row["message"]) for row in rows]


def jobs(spark: SparkSession) -> int:
    """How many jobs were ever started."""
    context: Any = spark.sparkContext._jsc
    return int(context.sc().dagScheduler().nextJobId())


def test_a_filter_passes_what_is_true_and_neither_false_nor_null(spark: SparkSession) -> None:
    assert kept(spark, "record.amount > 100", orders("50", "150", None)) == [False, True, False]


def test_a_few_rows_are_judged_without_a_spark_job(spark: SparkSession) -> None:
    before = jobs(spark)
    frame = orders(*map(str, range(200)))
    sink = consumer(filter="record.amount >= 100", transform="record.id", routing="record.note")
    rows = judged(spark, sink, frame)
    assert sum(row["keep"] for row in rows) == 100
    assert rows[150] == {
        "commit_lsn": COMMIT_LSN,
        "commit_idx": 150,
        "keep": True,
        "message": "150",
        "route": "n",
        "error": None,
    }
    assert (rows[50]["message"], rows[50]["route"]) == (None, None)
    assert jobs(spark) == before


def test_the_jobs_that_spark_does_start_are_counted(spark: SparkSession) -> None:
    before = jobs(spark)
    spark.range(10).repartition(2).count()
    assert jobs(spark) > before


def test_an_update_shows_the_old_values_of_what_changed(spark: SparkSession) -> None:
    frame = Frame()
    frame.add(pgoutput.update(OID, ["1", "7", "a"], old=["1", "5", "a"]), FULL)
    frame.add(pgoutput.update(OID, ["2", "7", "a"]), FULL)
    frame.add(pgoutput.update(OID, ["3", "7", "a"], old=["3", None, "a"]), FULL)
    frame.add(pgoutput.delete(OID, old=["3", "7", "a"]), FULL)
    assert sent(spark, "struct(action, changes, metadata.changed, record.amount)", frame) == [
        {
            "action": "update",
            "changes": {"id": None, "amount": 5, "note": None},
            "changed": ["amount"],
            "amount": 7,
        },
        {"action": "update", "changes": None, "changed": None, "amount": 7},
        {
            "action": "update",
            "changes": {"id": None, "amount": None, "note": None},
            "changed": ["amount"],
            "amount": 7,
        },
        {"action": "delete", "changes": None, "changed": None, "amount": 7},
    ]


def test_the_key_of_a_moved_row_and_values_that_were_not_sent_are_reported(
    spark: SparkSession,
) -> None:
    frame = Frame()
    frame.add(
        pgoutput.update(OID, ["2", "7", UNCHANGED, None], key=["1", None, None, None]), ORDERS
    )
    text = "struct(record.note, metadata.unchanged, metadata.record_pks, changes.id AS old)"
    assert sent(spark, text, frame) == [
        {"note": None, "unchanged": ["note"], "record_pks": ["2"], "old": 1}
    ]


def test_metadata_says_where_a_change_comes_from(spark: SparkSession) -> None:
    frame = orders("1", "2")
    (first, second) = sent(spark, "metadata", frame, ['{"user":"ann"}', None])
    assert first == {
        "table_schema": "public",
        "table_name": "things",
        "commit_timestamp": "2026-01-01T00:00:00.000001Z",
        "commit_lsn": COMMIT_LSN,
        "commit_idx": 0,
        "xid": 777,
        "idempotency_key": f"{COMMIT_LSN}:0",
        "record_pks": ["0"],
        "transaction_annotations": '{"user":"ann"}',
        "unchanged": None,
        "changed": None,
        "database_name": "shop",
        "consumer": {"name": "orders"},
        "database": {"name": "shop", "database": "shopdb", "hostname": "db.example"},
    }
    assert (second["transaction_annotations"], second["commit_idx"]) == (None, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("record.note", '"a \\"quoted\\" näme"'),
        ("record.amount", "7"),
        ("record.amount > 1", "true"),
        ("null", "null"),
        ("struct(record.amount, null AS n)", '{"amount":7,"n":null}'),
        ("array(record.amount, null)", "[7,null]"),
        ("map(record.note, 1)", '{"a \\"quoted\\" näme":1}'),
        ("record.at", '"2026-01-02T03:04:05.678900Z"'),
        ("cast(record.amount AS decimal(20, 4))", "7.0000"),
        ("from_json('{\"a\":1}', 'a int')", '{"a":1}'),
    ],
)
def test_a_transform_is_sent_as_the_json_of_its_value(
    spark: SparkSession, text: str, message: str
) -> None:
    row = order(1, "7", 'a "quoted" näme', "2026-01-02 03:04:05.6789+00")
    (only,) = judged(spark, consumer(transform=text), Frame().add(row, ORDERS))
    assert (only["error"], only["message"]) == (None, message)


def test_a_row_that_an_expression_fails_on_is_the_only_one_to_suffer(spark: SparkSession) -> None:
    frame = orders(*["0" if n in (3, 77, 78) else str(n + 1) for n in range(100)])
    sink = consumer(filter="record.id >= 0", transform="1000 div record.amount")
    rows = judged(spark, sink, frame)
    bad = [row["commit_idx"] for row in rows if row["error"]]
    assert bad == [3, 77, 78]
    assert rows[3]["error"].startswith(
        f"cannot judge the change at {Cursor(COMMIT_LSN, 3)} of table public.things: "
        "the transform of orders failed: [DIVIDE_BY_ZERO]: Division by zero"
    )
    assert not any(rows[at]["keep"] for at in bad)
    assert [row["message"] for row in rows if row["keep"]] == [
        str(1000 // (n + 1)) for n in range(100) if n not in bad
    ]


def test_nothing_of_rows_that_fail_stays_in_the_memory_of_spark(spark: SparkSession) -> None:
    jvm: Any = spark._jvm
    allocator = getattr(jvm, "org.apache.spark.sql.util.ArrowUtils$")
    root = getattr(allocator, "MODULE$").rootAllocator()

    def held() -> tuple[int, int]:
        return root.getAllocatedMemory(), root.getChildAllocators().size()

    before = held()  # the JVM has served other tests
    frame = orders(*["0" if n % 10 == 3 else "1" for n in range(50)])
    sink = consumer(filter="1 div record.amount > 0")
    assert sum(bool(row["error"]) for row in judged(spark, sink, frame)) == 5
    assert held() == before


def test_rows_that_the_filter_keeps_back_are_not_transformed(spark: SparkSession) -> None:
    frame = orders("0", "5")
    sink = consumer(filter="record.amount <> 0", transform="10 div record.amount")
    assert [(row["keep"], row["error"]) for row in judged(spark, sink, frame)] == [
        (False, None),
        (True, None),
    ]


def test_more_bad_rows_than_are_hunted_hold_the_consumer_up(spark: SparkSession) -> None:
    frame = orders(*["0"] * 101)
    with pytest.raises(TransientError, match="fail on more than 100 changes of one batch"):
        judged(spark, consumer(filter="1 div record.amount > 0"), frame)


def test_only_tables_and_actions_that_the_consumer_takes_are_judged(spark: SparkSession) -> None:
    frame = Frame()
    other = table(("k", 23, True), oid=OID + 1).replace(b"things\0", b"others\0")
    frame.add(pgoutput.insert(OID + 1, ["1"]), other, oid=OID + 1)
    frame.add(order(1, "1"), ORDERS)
    frame.add(pgoutput.delete(OID, key=["1", None, None, None]), ORDERS)
    frame.add(pgoutput.truncate([OID]), ORDERS)
    sink = consumer(
        filter="record.amount > 0",
        actions=["insert", "truncate"],
        source={"include_tables": ["public.things"]},
    )
    assert [row["commit_idx"] for row in judged(spark, sink, frame)] == [1]


def test_rows_of_several_tables_are_judged_in_cursor_order(spark: SparkSession) -> None:
    frame = Frame()
    other = table(("amount", 1700, True), oid=OID + 1).replace(b"things\0", b"others\0")
    for number in range(6):
        if number % 2:
            frame.add(pgoutput.insert(OID + 1, [f"{number}.5"]), other, oid=OID + 1)
        else:
            frame.add(order(number, str(number)), ORDERS)
    assert sent(spark, "cast(record.amount AS double)", frame) == [0, 1.5, 2, 3.5, 4, 5.5]


def test_a_value_without_a_typed_form_is_the_error_of_its_change(spark: SparkSession) -> None:
    frame = Frame().add(order(1, "x"), ORDERS).add(order(2, "2"), ORDERS)
    first, second = judged(spark, consumer(filter="true"), frame)
    assert "column 'amount'" in first["error"]
    assert (first["keep"], second["keep"]) == (False, True)


def test_a_message_that_breaks_the_protocol_has_no_verdict_and_does_no_harm(
    spark: SparkSession,
) -> None:
    frame = orders("1", "2")
    frame.add(order(3, "3")[:-1], ORDERS).add(order(4, "4"), ORDERS)
    found = judged(spark, consumer(transform="record.amount"), frame)
    assert [(row["commit_idx"], row["message"]) for row in found] == [(0, "1"), (1, "2"), (3, "4")]


def test_a_table_that_lacks_a_column_is_named(spark: SparkSession) -> None:
    with pytest.raises(ExpressionError, match=r"the filter of consumer orders .* public\.things"):
        judged(spark, consumer(filter="record.nope = 1"), orders("1"))


def test_a_table_without_columns_does_no_harm(spark: SparkSession) -> None:
    empty = table()
    frame = Frame().add(pgoutput.insert(OID, []), empty)
    assert kept(spark, "action = 'insert'", frame) == [True]


def test_names_are_taken_as_postgres_spells_them(spark: SparkSession) -> None:
    odd = table(("Id", 23, True), ("id", 23), ("a.b", 23), ("ü`x", 23))
    frame = Frame().add(pgoutput.insert(OID, ["1", "2", "3", "4"]), odd)
    text = "array(record.Id, record.id, record.`a.b`, record.`ü``x`)"
    assert sent(spark, text, frame) == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("route", "good"),
    [
        ("/orders", True),
        ("/orders/7%20b", True),
        ("/", True),
        ("orders", False),
        ("", False),
        ("/a/../b", False),
        ("/a/%2e%2E/b", False),
        ("//evil.example/x", False),
        ("http://evil.example", False),
        ("/a?b=c", False),
        ("/a#b", False),
        ("/a\\b", False),
        ("/" + "a" * 255, False),
    ],
)
def test_a_path_that_leaves_the_webhook_is_the_error_of_its_message(
    spark: SparkSession, route: str, good: bool
) -> None:
    frame = Frame().add(order(1, "1", route), ORDERS).add(order(2, "1", None), ORDERS)
    first, second = judged(spark, consumer(WEBHOOK, routing="record.note"), frame)
    assert (first["keep"], first["error"] is None) == (good, good)
    assert first["route"] == (route if good else None)
    assert (second["keep"], second["route"]) == (True, None)


def test_functions_of_the_operator_need_no_spark() -> None:
    sink = consumer(
        filter=f"{FUNCTIONS}:large",
        transform=f"{FUNCTIONS}:summary",
        routing=f"{FUNCTIONS}:by_note",
    )
    found = verdicts(None, sink, ORIGIN, raw(orders("50", "150"))).to_pylist()
    assert [(row["keep"], row["message"], row["route"]) for row in found] == [
        (False, None, None),
        (True, '{"order":1}', "n"),
    ]


def test_functions_and_sql_go_together(spark: SparkSession) -> None:
    frame = orders("0", "150", "7")
    sink = consumer(filter="record.amount > 0", transform=f"{FUNCTIONS}:fails_on_zero")
    rows = judged(spark, sink, frame)
    assert [(row["message"], row["error"]) for row in rows] == [
        (None, None),
        ("150", None),
        ("7", None),
    ]
    other = consumer(filter=f"{FUNCTIONS}:large", transform="10 div (150 - record.amount)")
    assert [bool(row["error"]) for row in judged(spark, other, frame)] == [False, True, False]


@pytest.mark.parametrize(
    ("key", "function", "says"),
    [
        ("transform", "fails_on_zero", "ValueError: an amount is zero"),
        ("transform", "not_json", "it gave a text that is no JSON"),
        ("filter", "too_few", "it gave 0 values for 1 rows"),
        ("filter", "numbers", "it gave values of int64, not of bool"),
        ("routing", "numbers", "it gave values of int64, not of string"),
        ("filter", "nothing", "it gave a NoneType, not a pyarrow.Array"),
    ],
)
def test_a_function_that_fails_is_named_in_the_error_of_its_row(
    key: str, function: str, says: str
) -> None:
    sink = consumer(FILE if key == "filter" else REDIS, **{key: f"{FUNCTIONS}:{function}"})
    (row,) = verdicts(None, sink, ORIGIN, raw(orders("0"))).to_pylist()
    assert f"operators_functions:{function} ({key}) failed: {says}" in row["error"]


def test_a_function_fails_for_its_bad_rows_alone() -> None:
    frame = orders("5", "0", "7")
    sink = consumer(FILE, transform=f"{FUNCTIONS}:fails_on_zero")
    found = verdicts(None, sink, ORIGIN, raw(frame)).to_pylist()
    assert [row["message"] for row in found] == ["5", None, "7"]
    assert "an amount is zero" in found[1]["error"]


_TIMES = table(("id", 20, True), ("at", 1184), ("local", 1114), ("day", 1082), ("days", 1182))
_USUAL = ("2026-01-02 03:04:05+00", "2026-01-02 03:04:05", "2026-01-02", "{2026-01-02}")


def _times(*given: dict[str, str]) -> Frame:
    """One row for each, with usual values but for those that are given."""
    frame = Frame()
    for number, values in enumerate(given):
        usual = dict(zip(("at", "local", "day", "days"), _USUAL, strict=True))
        frame.add(pgoutput.insert(OID, [str(number), *(usual | values).values()]), _TIMES)
    return frame


@pytest.mark.parametrize(
    "text",
    [
        "struct(record.id, record.at)",
        "record.local",
        "named_struct('inside', map('day', record.day))",
        "record.days",
        "concat('at ', record.at)",
    ],
)
def test_an_infinite_time_in_a_message_is_an_error_of_that_message(
    spark: SparkSession, text: str
) -> None:
    both = [
        {"at": word, "local": word, "day": word, "days": f"{{{word}}}"}
        for word in ("infinity", "-infinity")
    ]
    sound, rising, falling = judged(spark, consumer(transform=text), _times({}, *both))
    assert sound["error"] is None
    assert "2026-01-02" in sound["message"]
    for row in (rising, falling):
        assert "an infinite date or timestamp has no form in a message" in row["error"]


def test_an_infinite_time_compares_as_the_largest_and_can_be_given_a_form(
    spark: SparkSession,
) -> None:
    frame = _times({}, {"at": "infinity"}, {"at": "-infinity"})
    later = "record.at > timestamp'9999-12-31 23:59:59Z'"
    assert kept(spark, later, frame) == [False, True, False]
    said = sent(spark, "if(abs(year(record.at)) > 9999, 'for ever', string(record.day))", frame)
    assert said == ["2026-01-02", "for ever", "for ever"]
