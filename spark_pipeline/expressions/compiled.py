"""The expressions of one consumer: what they are, and whether a table can satisfy them.

Invariant: nothing is evaluated that was not checked for the table version at hand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, StringType

from cdc.config import SinkConfig
from cdc.config.expression import FUNCTION
from cdc.decoding.plan import TablePlan, plan_for
from cdc.errors import ConfigError, ExpressionError
from spark_pipeline.expressions.engine import Engine, Projection, spark_says
from spark_pipeline.expressions.failures import EvaluationError
from spark_pipeline.expressions.functions import Function, load_function
from spark_pipeline.expressions.pruning import pruned, used_schema
from spark_pipeline.expressions.rules import RuleError, check_analyzed, check_parsed
from spark_pipeline.expressions.visible_rows import seen_schema

_PROGRAMS_MAX = 512
# All digits of a timestamp are kept: without the formats Spark writes milliseconds.
JSON_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
# As Spark writes the numbers that stand for infinity: of timestamps, then of dates.
_INFINITE = (
    r"\+294247-01-10[T ]04:00:54\.775807|-290308-12-21[T ]19:59:05\.224192"
    r"|\+5881580-07-11|-5877641-06-23"
)
_BEFORE_VALUE, _AFTER_VALUE = len('{"v":'), len("}")
_FIXES = {
    "filter": "let it give true or false over record.<column>, changes.<column>, action and "
    "metadata.<field>",
    "transform": "let it give the message, such as struct(record.id, action)",
    "routing": "let it give a text, such as concat('orders.', record.region)",
}


Problem = tuple[str, str]
"""What is wrong, and what to do about it."""


@dataclass(frozen=True)
class Expressions:
    """What a consumer asks for, by key: SQL texts and names of Python functions."""

    consumer: str
    texts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, consumer: SinkConfig) -> Expressions | None:
        """None for a consumer that has none of the three."""
        given = tuple(consumer.expressions.items())
        return cls(consumer.name, given) if given else None

    @cached_property
    def sql(self) -> dict[str, str]:
        """The expressions that Spark evaluates."""
        return {key: text for key, text in self.texts if not text.startswith(FUNCTION)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The functions that Python evaluates; ConfigError if one is not there."""
        return {
            key: load_function(key, text) for key, text in self.texts if text.startswith(FUNCTION)
        }

    def has(self, key: str) -> bool:
        return any(key == known for known, _ in self.texts)

    def check(self, spark: SparkSession | None, plan: TablePlan) -> None:
        """ExpressionError if the table version cannot satisfy them; it names all that is wrong."""
        of_form = self.form_problems(spark)
        problems = [
            *of_form.values(),
            *self.table_problems(spark, plan, besides=of_form.keys()),
        ]
        if problems:
            raise ExpressionError("; ".join(what for what, _ in problems), fix=problems[0][1])

    def form_problems(self, spark: SparkSession | None) -> dict[str, Problem]:
        """By key what is wrong whatever the table."""
        found: dict[str, Problem] = {}
        for key, text in self.texts:
            place = f"the {key} of consumer {self.consumer} cannot be used"
            if text.startswith(FUNCTION):
                try:
                    load_function(key, text)
                except ConfigError as error:
                    found[key] = (f"{place}: {error.what}", error.fix)
            elif what := _form_problem(_engine(spark), text):
                found[key] = (f"{place}: {what}", f"correct it in the configuration: {_FIXES[key]}")
        return found

    def table_problems(
        self, spark: SparkSession | None, plan: TablePlan, besides: Collection[str] = ()
    ) -> list[Problem]:
        """What a table version cannot satisfy, of the expressions that are right in form."""
        found = []
        for key, text in self.sql.items():
            what = "" if key in besides else _problem(_engine(spark), key, text, plan)
            if what:
                found.append(
                    (
                        f"the {key} of consumer {self.consumer} cannot be used on table "
                        f"{plan.relation}: {what}",
                        f"correct it in the configuration ({_FIXES[key]}), or leave the table out "
                        "of the sink's source",
                    )
                )
        return found

    def columns(self, keep: Column | None = None) -> dict[str, Column]:
        """The answers of the SQL expressions; ``keep`` in place of a filter of theirs.

        Only a change that passes is transformed and routed: a filter may keep back what the others
        would fail on.
        """
        filtered = (
            sf.coalesce(sf.expr(self.sql["filter"]), sf.lit(False))
            if ("filter" in self.sql)
            else None
        )
        passes = keep if filtered is None else filtered
        chosen: dict[str, Column] = {} if filtered is None else {"filter": filtered}
        if "transform" in self.sql:
            value = sf.struct(sf.expr(self.sql["transform"]).alias("v"))
            chosen["transform"] = _when(passes, _finite(sf.to_json(value, JSON_OPTIONS)))
        if "routing" in self.sql:
            chosen["routing"] = _when(passes, _finite(sf.expr(self.sql["routing"])))
        return chosen


def _when(passes: Column | None, column: Column) -> Column:
    return column if passes is None else sf.when(passes, column)


def _finite(text: Column) -> Column:
    """The text, or an error if it has an infinite date or timestamp in it.

    Spark has no infinity. In a filter the largest and the smallest number of the type do as well,
    because they compare as infinity does; in a message they would be a time that was never written.
    """
    error = sf.raise_error(sf.lit("an infinite date or timestamp has no form in a message"))
    return sf.when(sf.rlike(text, sf.lit(_INFINITE)), error).otherwise(text)


def bare_values(texts: pa.StringArray) -> pa.StringArray:
    """The values that stand in ``{"v":…}``."""
    inside = pc.binary_slice(texts.cast(pa.binary()), _BEFORE_VALUE, -_AFTER_VALUE)
    return inside.cast(pa.string())


def _engine(spark: SparkSession | None) -> Engine:
    assert spark is not None, "SQL expressions need Spark"
    return Engine.of(spark)


@lru_cache(maxsize=_PROGRAMS_MAX)
def _form_problem(engine: Engine, text: str) -> str:
    """What is wrong with an expression whatever the table; nothing if it is right in form."""
    try:
        check_parsed(engine, text)
    except RuleError as error:
        return str(error)
    except PySparkException as error:
        return spark_says(error)
    return ""


def _problem(engine: Engine, key: str, text: str, plan: TablePlan) -> str:
    """What keeps an expression of good form from being used on a table; nothing if it can be."""
    try:
        frame = engine.frame(seen_schema(plan)).select(sf.expr(text).alias("v"))
        check_analyzed(engine, frame)
        given = frame.schema["v"].dataType
        if key == "transform":
            frame.select(sf.to_json(sf.struct("v"), JSON_OPTIONS)).schema  # noqa: B018
        # Constants are worked out now: one that fails would fail for every change.
        java: Any = frame._jdf
        java.queryExecution().optimizedPlan()
        wanted = {"filter": BooleanType, "routing": StringType}.get(key)
    except RuleError as error:
        return str(error)
    except PySparkException as error:
        return spark_says(error)
    if wanted is not None and not isinstance(given, wanted):
        return f"it gives {given.simpleString()}, not {wanted().simpleString()}"
    return ""


class Program:
    """A consumer's SQL expressions for one table version, checked and ready to run."""

    def __init__(self, engine: Engine, expressions: Expressions, plan: TablePlan) -> None:
        columns = expressions.columns()
        named = [column.alias(key) for key, column in columns.items()]
        self._schema = schema = used_schema(engine, seen_schema(plan), named)
        self._whole = Projection(engine, schema, named)
        self._alone = {
            key: partial(Projection, engine, schema, [column]) for key, column in columns.items()
        }
        self._made: dict[str, Projection] = {}

    def run(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """One column per key: ``filter``, ``transform`` and ``routing``, as far as they are SQL."""
        said = self._whole.run(pruned(rows, self._schema))
        at = said.schema.get_field_index("transform")
        if at < 0:
            return said
        return said.set_column(at, "transform", bare_values(said.column(at)))

    def failing_key(self, row: pa.RecordBatch) -> str:
        """Which of the expressions fails on a row that ``run`` failed on."""
        for key, make in self._alone.items():
            if len(self._alone) == 1:
                return key
            try:
                if key not in self._made:
                    self._made[key] = make()
                self._made[key].run(pruned(row, self._schema))
            except EvaluationError:
                return key
        return "expression"


@lru_cache(maxsize=_PROGRAMS_MAX)
def looked_at(engine: Engine, expressions: Expressions, schema: bytes) -> pa.Schema:
    """What the SQL expressions look at of a table version, which is checked for them."""
    plan = plan_for(schema)
    expressions.check(engine.session, plan)
    return used_schema(engine, seen_schema(plan), list(expressions.columns().values()))


@lru_cache(maxsize=_PROGRAMS_MAX)
def program_for(engine: Engine, expressions: Expressions, schema: bytes) -> Program:
    """The program for a table version, by its Relation message as the log keeps it."""
    plan = plan_for(schema)
    expressions.check(engine.session, plan)
    return Program(engine, expressions, plan)
