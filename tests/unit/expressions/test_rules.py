"""What an expression may not do, and how a problem is told."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc.decoding.plan import plan_for
from cdc.errors import ConfigError, ExpressionError
from spark_pipeline.expressions.compiled import Expressions
from tests.unit.expressions.tables import FILE, ORDERS, consumer

AGAIN = "may say something else when the change is delivered again"
ALONE = "it may look at one change alone"


def check(spark: SparkSession, **given: Any) -> None:
    expressions = Expressions.of(consumer(**given))
    assert expressions is not None
    expressions.check(spark, plan_for(ORDERS))


def test_a_consumer_without_expressions_has_none() -> None:
    assert Expressions.of(consumer(FILE)) is None


@pytest.mark.parametrize(
    "text",
    [
        "record.amount > 100 AND action <> 'delete'",
        "record.amount BETWEEN 1 AND 2",
        "record['amount'] IN (1, 2, 3)",
        "exists(array(1, 2), x -> x > record.amount)",
        "CASE WHEN record.note LIKE 'a%' THEN true ELSE false END",
        "system.builtin.upper(action) = 'INSERT'",
        "record.at > TIMESTAMP '2026-01-01 00:00:00Z'",
        "record.at > '2026-01-01'",
        "record.note = 'today'",
        "changes.amount IS NOT NULL",
        "array_contains(metadata.changed, 'amount')",
        "get_json_object(metadata.transaction_annotations, '$.user') = 'ann'",
        "sha2(record.note, 256) = ''",
        "try_cast(record.note AS int) > 1 -- a comment",
        "year(record.at) = 2026",
        "parse_json(record.note):a::int = 1",
    ],
)
def test_an_expression_over_one_change_is_taken(spark: SparkSession, text: str) -> None:
    check(spark, filter=text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rand() > 0.5", AGAIN),
        ("uuid() = 'a'", AGAIN),
        ("shuffle(array(1)) IS NULL", AGAIN),
        ("uniform(0, 10) > 5", AGAIN),
        ("aes_encrypt('a', '1234567890123456') IS NULL", AGAIN),
        ("current_timestamp > record.at", AGAIN),
        ("current_timestamp() > record.at", AGAIN),
        ("now() > record.at", AGAIN),
        ("current_date = date(record.at)", AGAIN),
        ("unix_timestamp() > 1", AGAIN),
        ("localtimestamp() > record.at", AGAIN),
        ("current_timezone() = 'UTC'", AGAIN),
        ("TIMESTAMP 'now' > record.at", AGAIN),
        ("DATE /* x */ 'yesterday' > record.at", AGAIN),
        ("record.at > 'today'", AGAIN),
        ("cast('tomorrow' AS timestamp) > record.at", AGAIN),
        ("to_timestamp('now') > record.at", AGAIN),
        ("sum(record.amount) > 1", ALONE),
        ("any_value(action) = 'a'", ALONE),
        ("row_number() OVER (ORDER BY record.id) > 1", ALONE),
        ("explode(array(true))", ALONE),
        ("json_tuple(record.note, 'a')", "generators are refused"),
        ("(SELECT true)", ALONE),
        ("EXISTS (SELECT 1)", ALONE),
        ("record.id IN (SELECT 1)", ALONE),
        ("window(record.at, '1 minute').start > record.at", ALONE),
        ("java_method('java.lang.Math', 'abs', 1) = '1'", ALONE),
        ("reflect('java.lang.Runtime', 'getRuntime') = ''", ALONE),
        ("try_reflect('java.lang.Runtime', 'getRuntime') = ''", ALONE),
        ("input_file_name() = ''", ALONE),
        ("current_user = 'a'", ALONE),
        ("session_user() = 'a'", ALONE),
        ("current_database() = 'a'", ALONE),
        ("version() = '1'", ALONE),
        ("monotonically_increasing_id() > 1", ALONE),
        ("from_protobuf(record.note, 'a', '/etc/passwd') IS NULL", ALONE),
        ("xpath_string(record.note, 'a') = ''", ALONE),
        ("spark_catalog.default.mine(1)", "there is no function"),
        ("read_files('/etc/passwd') = ''", "there is no function"),
        ("record.*", "is not a value"),
        ("record.id > 1 AS x", "leave out AS"),
        ("record.id >", "Syntax error"),
        ("record.nope > 1", "No such struct field `nope`"),
        ("record.Amount > 1", "No such struct field `Amount`"),
        ("commit_lsn > 1", "UNRESOLVED_COLUMN"),
        ("record.amount", "it gives int, not boolean"),
        ("1 div 0 > 1", "Division by zero"),
        ("record.amount > 'x' AND cast('x' AS int) > 1", "cannot be cast"),
    ],
)
def test_an_expression_that_may_not_be_is_refused(
    spark: SparkSession, text: str, says: str
) -> None:
    with pytest.raises(ExpressionError) as caught:
        check(spark, filter=text)
    assert says in caught.value.what
    assert caught.value.what.startswith("the filter of consumer orders cannot be used")
    assert "correct it in the configuration" in caught.value.fix
    assert len(caught.value.what) < 500


def test_a_function_that_a_user_registered_is_refused(spark: SparkSession) -> None:
    spark.udf.register("mine", lambda: True, "boolean")
    with pytest.raises(ExpressionError, match="there is no function mine of Spark's own"):
        check(spark, filter="mine()")


def test_settings_of_the_operators_session_change_nothing(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        with pytest.raises(ExpressionError, match="Division by zero"):
            check(spark, filter="1 div 0 > 1")
    finally:
        spark.conf.unset("spark.sql.ansi.enabled")


def test_a_routing_gives_a_text_and_a_transform_what_json_can_hold(spark: SparkSession) -> None:
    with pytest.raises(ExpressionError, match="it gives bigint, not string"):
        check(spark, routing="record.id")
    with pytest.raises(ExpressionError, match="the transform of consumer orders"):
        check(spark, transform="map(array(record.id), struct(interval '1' day), 1, 2)")


def test_every_problem_is_reported_at_once(spark: SparkSession) -> None:
    with pytest.raises(ExpressionError) as caught:
        check(spark, filter="record.nope", transform="rand()", routing="1")
    for key in ("filter", "transform", "routing"):
        assert f"the {key} of consumer orders" in caught.value.what


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("python:no.such.module:f", "no.such.module cannot be imported"),
        ("python:tests.unit.expressions.operators_functions:absent", "has no function absent"),
        ("python:tests.unit.expressions.operators_functions:NOT_A_FUNCTION", "has no function"),
    ],
)
def test_a_function_that_is_not_there_is_reported(name: str, says: str) -> None:
    expressions = Expressions.of(consumer(filter=name))
    assert expressions is not None
    with pytest.raises(ConfigError, match=says):
        expressions.check(None, plan_for(ORDERS))
