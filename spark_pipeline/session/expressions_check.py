"""Every expression of a configuration, checked against every table that it will meet.

It is done when the service starts and by ``walbrook config check``. Invariant: all
problems are reported at once; a table without a description stops nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import psycopg
from pyspark.sql import SparkSession

from cdc.config import Config, Database, SinkConfig
from cdc.decoding.plan import plan_for
from cdc.errors import ConfigError, WalbrookError
from cdc.reach import reach
from cdc.replication.source.published import published_relations
from spark_pipeline.delivery.matching import Match
from spark_pipeline.eventtime.windows.check import check_windows
from spark_pipeline.expressions.compiled import Expressions

_LISTED_MAX: Final = 20


@dataclass
class CheckResult:
    """What a check came to: problems with their fixes, and what it could not look at."""

    problems: list[str] = field(default_factory=list)  # whatever the tables are
    unfit: list[str] = field(default_factory=list)  # with a table as it is now
    unchecked: list[str] = field(default_factory=list)

    def raise_problems(self, *, unfit: bool = True) -> None:
        """ConfigError with all of them, if there are any."""
        problems = [*self.problems, *(self.unfit if unfit else ())]
        if not problems:
            return
        listed = problems[:_LISTED_MAX]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        raise ConfigError("\n  ".join(["expressions cannot be used:", *listed]))


def has_expressions(config: Config, *, sql: bool = False) -> bool:
    """Whether an active sink has any, those of windows included; with ``sql``, any for Spark."""
    active = [sink for sink in config.sinks if sink.status == "active"]
    found = [Expressions.of(sink) for sink in active]
    return any(one is not None and (not sql or bool(one.sql)) for one in found) or any(
        sink.window is not None for sink in active
    )


def check_config(spark: SparkSession | None, config: Config) -> CheckResult:
    """Every consumer's expressions, against the tables of every source that answers."""
    found = CheckResult()
    relations: dict[str, list[bytes]] = {}
    windowed = [
        sink for sink in config.sinks if sink.status == "active" and sink.window is not None
    ]
    for database in config.databases:
        sinks = _with_expressions(config, database)
        if not sinks and not any(sink in windowed for sink in config.sinks_of(database.name)):
            continue
        try:
            with reach(database.dsn(), f"database {database.name}") as source:
                relations[database.name] = published_relations(source, database.publication.name)
        except (WalbrookError, psycopg.Error) as error:
            found.unchecked.append(
                f"the expressions on database {database.name} were checked for their form alone, "
                f"not against its tables: {str(error).strip()}"
            )
        _check(found, spark, sinks, relations.get(database.name, ()))
    of_windows = check_windows(spark, windowed, relations)
    found.problems += map(_with_fix, of_windows.of_form)
    found.unfit += map(_with_fix, of_windows.of_tables)
    return found


def check_expressions(
    spark: SparkSession | None, config: Config, database: Database, relations: Sequence[bytes]
) -> None:
    """ConfigError that names every expression and table of ``relations`` that do not fit.

    ``relations`` are Relation messages as the log keeps them.
    """
    found = CheckResult()
    _check(found, spark, _with_expressions(config, database), relations)
    found.raise_problems()


def _with_expressions(config: Config, database: Database) -> list[tuple[SinkConfig, Expressions]]:
    sinks = [sink for sink in config.sinks_of(database.name) if sink.status == "active"]
    found = [(sink, Expressions.of(sink)) for sink in sinks]
    return [(sink, expressions) for sink, expressions in found if expressions is not None]


def _check(
    found: CheckResult,
    spark: SparkSession | None,
    sinks: Sequence[tuple[SinkConfig, Expressions]],
    relations: Sequence[bytes],
) -> None:
    for sink, expressions in sinks:
        # A problem that no table changes is reported once.
        of_form = expressions.form_problems(spark)
        found.problems += map(_with_fix, of_form.values())
        match = Match.of(sink)
        for plan in map(plan_for, relations):
            if match.takes(plan.relation.namespace, plan.relation.name):
                of_table = expressions.table_problems(spark, plan, besides=of_form.keys())
                found.unfit += map(_with_fix, of_table)


def _with_fix(problem: tuple[str, str]) -> str:
    what, fix = problem
    return f"{what}. To fix it: {fix}"
