"""Whether the expressions of a window may be what they are, and fit the tables of its consumer.

Invariant: nothing is run that was not checked here; all problems are reported, each with
its fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from cdc.config import SinkConfig
from cdc.decoding.plan import plan_for
from spark_pipeline.delivery.matching import Match
from spark_pipeline.eventtime.windows.query import EXTRA_FIELDS, Aggregation, WindowQuery
from spark_pipeline.eventtime.windows.tables import Tables, WindowTables
from spark_pipeline.expressions.compiled import Problem
from spark_pipeline.expressions.engine import Engine, spark_says
from spark_pipeline.expressions.pruning import used_by
from spark_pipeline.expressions.rules import (
    RuleError,
    check_aggregate,
    check_analyzed,
    check_parsed,
)

_FIXES: Final = {
    "group_by": "let it give the value to group by, such as record.region, over record.<column>, "
    "changes.<column>, action and metadata.<field>",
    "aggregates": "let it give one value of many changes, such as count(*) or sum(record.amount)",
}
_QUOTED: Final = re.compile(r"`((?:[^`]|``)*)`")


@dataclass(frozen=True)
class WindowProblems:
    """What is wrong with a window: whatever the tables are, and with these tables."""

    of_form: list[Problem]
    of_tables: list[Problem]


def check_window(
    spark: SparkSession, consumer: str, spec: Aggregation, tables: Tables | None
) -> WindowProblems:
    """All that is wrong; of the form alone if the tables are not known."""
    engine = Engine.of(spark)
    checked = _Checked(engine, consumer, WindowTables.of(tables or {}))
    of_form = checked.form_problems(spec)
    if tables is None:
        return WindowProblems(list(of_form.values()), [])
    of_tables = checked.table_problems(spec, set(of_form))
    return WindowProblems(list(of_form.values()), of_tables)


def check_windows(
    spark: SparkSession | None,
    sinks: Iterable[SinkConfig],
    relations: Mapping[str, Sequence[bytes]],
) -> WindowProblems:
    """The windows of all sinks, against the tables of their databases as far as all are known.

    ``relations`` are Relation messages as the log keeps them, by database. A window may take a
    column of any of its tables, so nothing is said of those as long as one database is silent.
    """
    found = WindowProblems([], [])
    for sink in sinks:
        window = sink.window
        if window is None:
            continue
        assert spark is not None, "a window needs Spark"
        one = check_window(spark, sink.name, window, tables_of(sink, relations))
        found.of_form.extend(one.of_form)
        found.of_tables.extend(one.of_tables)
    return found


def tables_of(sink: SinkConfig, relations: Mapping[str, Sequence[bytes]]) -> Tables | None:
    """The tables that a sink takes; None where a database is silent, or there is no table yet."""
    sources: Sequence[str] = getattr(sink, "sources", (sink.database,))
    if not relations.keys() >= set(sources):
        return None
    match = Match.of(sink)
    tables = {
        source: [
            plan
            for plan in map(plan_for, relations[source])
            if match.takes(plan.relation.namespace, plan.relation.name)
        ]
        for source in sources
    }
    return tables if any(tables.values()) else None


@dataclass(frozen=True)
class _Checked:
    engine: Engine
    consumer: str
    tables: WindowTables

    def form_problems(self, spec: Aggregation) -> dict[tuple[str, str], Problem]:
        """By key and name what is wrong with an expression whatever the tables."""
        found = {}
        for key, name, text in _each(spec):
            try:
                check_parsed(self.engine, text, aggregates=key == "aggregates")
            except (RuleError, PySparkException) as error:
                found[key, name] = self._problem(key, name, "cannot be used", error)
        return found

    def table_problems(self, spec: Aggregation, besides: set[tuple[str, str]]) -> list[Problem]:
        """What the tables cannot satisfy, of the expressions that are right in form."""
        found = []
        for key, name, text in _each(spec):
            if (key, name) not in besides:
                try:
                    self._check(key, text)
                except (RuleError, PySparkException) as error:
                    found.append(self._problem(key, name, "cannot be used on its tables", error))
        if not found and not besides:
            try:
                _optimize(self._query(spec))
            except PySparkException as error:
                found.append(
                    (
                        f"the window of consumer {self.consumer} cannot be used on its tables: "
                        f"{spark_says(error)}",
                        "correct window.group_by and window.aggregates in the configuration",
                    )
                )
        return found

    @cached_property
    def _seen(self) -> DataFrame:
        """No changes, as expressions see them."""
        return self.engine.frame(self.tables.schema)

    def _check(self, key: str, text: str) -> None:
        if key == "group_by":
            chosen: Any = self._seen.select(sf.expr(text).alias("v"))
            check_analyzed(self.engine, chosen)
            (tree,) = _trees(chosen._jdf.queryExecution().analyzed().projectList())
        else:
            chosen = self._seen.agg(sf.expr(text).alias("v"))
            plan = chosen._jdf.queryExecution().analyzed()
            if str(plan.nodeName()) != "Aggregate":
                raise RuleError("it needs more than the changes of a group")
            (tree,) = _trees(plan.aggregateExpressions())
            texts = {name for name, one in self.tables.columns.items() if one.is_numeric_text}
            check_aggregate(self.engine, tree, texts)
        self._check_types(used_by([tree], self.tables.schema))
        _optimize(chosen)

    def _check_types(self, used: pa.Schema) -> None:
        for row in ("record", "changes"):
            if row in used.names:
                for field in used.field(row).type:
                    if field.name in self.tables.conflicts:
                        raise RuleError(
                            f"the column {field.name} is {self.tables.conflicts[field.name]}: a "
                            "window has one type for it"
                        )

    def _query(self, spec: Aggregation) -> DataFrame:
        frame = self.engine.frame(pa.schema([*self.tables.schema, *EXTRA_FIELDS]))
        return WindowQuery(frame, spec).over(frame)

    def _problem(
        self, key: str, name: str, which: str, error: RuleError | PySparkException
    ) -> Problem:
        what = str(error) if isinstance(error, RuleError) else _spark_says(error)
        fix = f"correct it in the configuration: {_FIXES[key]}"
        if which != "cannot be used":
            fix += "; or name the sink's tables with source.include_tables"
        return (f"{key}.{name} of the window of consumer {self.consumer} {which}: {what}", fix)


def _each(spec: Aggregation) -> list[tuple[str, str, str]]:
    return [
        (key, name, text)
        for key, texts in (("group_by", spec.group_by), ("aggregates", spec.aggregates))
        for name, text in texts.items()
    ]


def _trees(sequence: Any) -> list[Any]:
    return [sequence.apply(at) for at in range(sequence.size())]


def _optimize(frame: DataFrame) -> None:
    """Constants are worked out now: one that fails would fail for every window."""
    java: Any = frame._jdf
    java.queryExecution().optimizedPlan()


def _spark_says(error: PySparkException) -> str:
    """Spark's message, with the name that may have been meant where a column is not there."""
    said = spark_says(error)
    if error.getCondition() in ("MISSING_GROUP_BY", "MISSING_AGGREGATION"):
        return (
            "a column stands outside of its aggregates, and a group may have many values of it: "
            "put it into one, such as max(record.<column>)"
        )
    if error.getCondition() != "FIELD_NOT_FOUND":
        return said
    parameters = error.getMessageParameters() or {}
    (asked,) = _QUOTED.findall(parameters.get("fieldName", "``"))[:1] or [""]
    near = get_close_matches(asked, _QUOTED.findall(parameters.get("fields", "")), n=1)
    return f"{said} (did you mean {near[0]}?)" if near else said
