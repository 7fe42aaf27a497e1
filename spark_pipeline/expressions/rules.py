"""What an expression may do: look at one change, and always say the same of it.

Two looks, each enough for most of what is refused. The parsed tree shows every function by name,
and only Spark's own functions of known groups are taken, so that one that a later Spark brings, or
a user registered, is refused until it is looked at. The analyzed plan shows what became of them:
only a choice of columns over the change itself may be left, and it must be deterministic, for a
change that is delivered again must get the same answer.

The aggregates of a window look at all changes of a group instead; of those, only such are taken as
give the same whatever order the changes come in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any, Final

from pyspark.sql import DataFrame

from spark_pipeline.expressions.engine import Engine


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GROUPS: Final = _words(
    "array_funcs bitwise_funcs collection_funcs conditional_funcs conversion_funcs csv_funcs "
    "datetime_funcs hash_funcs json_funcs lambda_funcs map_funcs math_funcs predicate_funcs "
    "string_funcs struct_funcs url_funcs variant_funcs vector_funcs"
)
_ALSO: Final = _words(
    "aes_decrypt assert_true bitmap_bit_position bitmap_bucket_number bitmap_count hmac "
    "raise_error try_aes_decrypt typeof"
)
_CLOCK: Final = _words(
    "curdate current_date current_time current_timestamp current_timezone localtime "
    "localtimestamp now"
)
_RANDOM: Final = _words("aes_encrypt rand randn random randstr shuffle uniform uuid")
_AGGREGATES: Final = _words(
    "any approx_count_distinct approx_percentile avg bit_and bit_or bit_xor bool_and bool_or corr "
    "count count_if covar_pop covar_samp every kurtosis max max_by mean median min min_by "
    "percentile percentile_approx percentile_cont percentile_disc regr_avgx regr_avgy regr_count "
    "regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy skewness some std stddev "
    "stddev_pop stddev_samp sum try_avg try_sum var_pop var_samp variance"
)
_BECOMES: Final = "regrreplacement"  # what regr_sxx and regr_syy are made of
_OTHER: Final = _words("session_window window window_time")
# What a name without brackets, or a call without arguments, becomes when it is analyzed.
_CLOCK_CLASSES: Final = _words(
    "CurrentBatchTimestamp CurrentDate CurrentTime CurrentTimeZone CurrentTimestamp LocalTime "
    "LocalTimestamp Now"
)
_OUTSIDE_CLASSES: Final = _words(
    "CallMethodViaReflection CurrentCatalog CurrentDatabase CurrentPath CurrentUser "
    "InputFileBlockLength InputFileBlockStart InputFileName MonotonicallyIncreasingID "
    "SparkPartitionID SparkVersion TryReflect"
)
_BASES: Final = {
    "SubqueryExpression": "subqueries",
    "PlanExpression": "subqueries",
    "UserDefinedExpression": "functions that are not Spark's own",
    "Generator": "functions that make several rows of one",
    "WindowExpression": "window functions",
}
_AGGREGATE_BASES: Final = {
    "aggregate.AggregateExpression": "aggregates",
    "aggregate.AggregateFunction": "aggregates",
}
# What compares its argument, where a numeric that Spark has as text would be compared as text.
_COMPARING: Final = _words("Max MaxBy Min MinBy")
_EXPRESSIONS: Final = "org.apache.spark.sql.catalyst.expressions"
_NODES_MAX: Final = 5_000
_GAP = r"(?:\s|/\*.*?\*/|--[^\n]*\n)*"
_MOVING_LITERAL: Final = re.compile(
    rf"\b(?:date|timestamp(?:_ntz|_ltz)?){_GAP}['\"]\s*(?:now|today|tomorrow|yesterday)\b",
    re.IGNORECASE | re.DOTALL,
)
_MOVING_TEXT: Final = re.compile(r"\s*(?:now|today|tomorrow|yesterday)\b", re.IGNORECASE)
_ORDER: Final = "what it gives may depend on the order of the changes, or has no bound"


class RuleError(Exception):
    """What an expression does that it may not."""


def check_parsed(engine: Engine, text: str, *, aggregates: bool = False) -> None:
    """Refuse by what is written; Spark's ParseException says what is no expression at all.

    ``aggregates``: those that a window may have are taken.
    """
    session: Any = engine.session._jsparkSession
    tree = session.sessionState().sqlParser().parseExpression(text)
    if _name(tree) in ("Alias", "MultiAlias"):
        raise RuleError("a name has no use here: leave out AS and what follows it")
    aggregating = False
    for node in _nodes(tree):
        name = _name(node)
        if name in ("UnresolvedStar", "UnresolvedRegex", "ResolvedStar"):
            raise RuleError("* is not a value: write struct(…) or record as a whole")
        if name == "ExpressionWithUnresolvedIdentifier":
            # Which function or column it names is known only after the rules for names.
            raise RuleError("IDENTIFIER is refused: write the name itself")
        if name == "UnresolvedFunction":
            function = str(node.nameParts().mkString(".")).lower()
            aggregating |= _check_function(engine, function, aggregates)
        _check_base(engine, node, aggregates=aggregates)
        # Some aggregates, such as first, have a grammar of their own and are functions already.
        aggregating |= _check_aggregate_function(engine, node)
    if _MOVING_LITERAL.search(text):
        raise RuleError(_moving("a date that moves with the clock"))
    if aggregates and not aggregating:
        raise RuleError("it aggregates nothing: write count(*), sum(record.<column>) or the like")


def check_analyzed(engine: Engine, frame: DataFrame) -> None:
    """Refuse by what became of it; ``frame`` is the expression chosen from the change."""
    java: Any = frame._jdf
    plan = java.queryExecution().analyzed()
    if _name(plan) != "Project" or _name(plan.child()) != "LogicalRDD":
        raise RuleError(
            "it needs more than the change itself: aggregates, windows and generators are refused"
        )
    (tree,) = _each(plan.projectList())
    for node in _nodes(tree, engine):
        _check_base(engine, node)
        _check_node(node)


def check_aggregate(engine: Engine, tree: Any, numeric_texts: Collection[str]) -> None:
    """Refuse an analyzed aggregate by what became of it.

    ``numeric_texts`` are the columns that are numbers to Postgres and text to Spark: Spark would
    add them up as 64-bit floats and compare them letter by letter.
    """
    user_specified = engine.jvm.org.apache.spark.sql.catalyst.expressions.Cast.USER_SPECIFIED_CAST()
    for node in _nodes(tree, engine):
        name = _name(node)
        _check_base(engine, node, aggregates=True)
        _check_node(node)
        _check_aggregate_function(engine, node)
        if name in _COMPARING:
            _check_compared(node, numeric_texts)
        elif (
            name == "Cast"
            and _is_text_as_double(node)
            and node.getTagValue(user_specified).isEmpty()
        ):
            raise RuleError(
                f"it would make 64-bit floats of the texts {_shown(node.child())}, which rounds: "
                "write cast(… AS decimal(38, 9)), or AS double if that will do"
            )


def _check_aggregate_function(engine: Engine, node: Any) -> bool:
    """Refuse an aggregate that may not be; whether it is one."""
    if not _is_a(engine, str(node.getClass().getName()), "aggregate.AggregateFunction"):
        return False
    name = str(node.prettyName())
    if name not in _AGGREGATES and name != _BECOMES:
        raise RuleError(f"the function {name} is refused: {_ORDER}")
    return True


def _check_compared(function: Any, numeric_texts: Collection[str]) -> None:
    # Of max_by and min_by the last argument is the one that is compared.
    compared = _each(function.children())[-1]
    if _name(compared) == "GetStructField" and str(compared.extractFieldName()) in numeric_texts:
        raise RuleError(
            f"it would compare the numbers {_shown(compared)} as texts, for they have no declared "
            "precision: write cast(… AS decimal(38, 9))"
        )


def _is_text_as_double(cast: Any) -> bool:
    types = [str(node.dataType().typeName()) for node in (cast.child(), cast)]
    return types == ["string", "double"]


def _shown(node: Any) -> str:
    return str(node.sql()) if _name(node) != "GetStructField" else str(node.toString())


def _check_node(node: Any) -> None:
    name = _name(node)
    if name in _CLOCK_CLASSES:
        raise RuleError(_moving("the clock or the time zone of the session"))
    if name in _OUTSIDE_CLASSES:
        raise RuleError(_outside(str(node.prettyName())))
    if not node.deterministic():
        raise RuleError(_moving(f"the function {node.prettyName()}"))
    if name == "Cast" and _is_moving_text(node):
        raise RuleError(_moving("a date that moves with the clock"))


def _check_function(engine: Engine, name: str, aggregates: bool) -> bool:
    """Refuse one that may not be; whether it is an aggregate."""
    plain = name.removeprefix("system.builtin.").removeprefix("builtin.")
    if plain in _CLOCK | _RANDOM:
        raise RuleError(_moving(f"the function {plain}"))
    functions = engine.jvm.org.apache.spark.sql.catalyst
    known = functions.analysis.FunctionRegistry.builtin().lookupFunction(
        functions.FunctionIdentifier(plain)
    )
    if known.isEmpty():
        raise RuleError(f"there is no function {name} of Spark's own")
    if aggregates and plain in _AGGREGATES:
        return True
    if aggregates and known.get().getGroup() == "agg_funcs":
        raise RuleError(f"the function {plain} is refused: {_ORDER}")
    if plain in _OTHER or (known.get().getGroup() not in _GROUPS and plain not in _ALSO):
        raise RuleError(_outside(plain))
    return False


def _check_base(engine: Engine, node: Any, *, aggregates: bool = False) -> None:
    kind = str(node.getClass().getName())
    refused = _BASES if aggregates else _BASES | _AGGREGATE_BASES
    for base, what in refused.items():
        if _is_a(engine, kind, base):
            raise RuleError(f"{what} are refused: it may look at one change alone")


@lru_cache(maxsize=_NODES_MAX)
def _is_a(engine: Engine, kind: str, base: str) -> bool:
    find = engine.jvm.java.lang.Class.forName
    return bool(find(f"{_EXPRESSIONS}.{base}").isAssignableFrom(find(kind)))


def _is_moving_text(cast: Any) -> bool:
    child = cast.child()
    if _name(child) != "Literal" or child.value() is None:
        return False
    to_time = str(cast.dataType().typeName()).startswith(("date", "timestamp"))
    return to_time and _MOVING_TEXT.match(str(child.toString())) is not None


def _moving(what: str) -> str:
    return f"{what} may say something else when the change is delivered again"


def _outside(name: str) -> str:
    return f"the function {name} is refused: it may look at one change alone"


def _nodes(tree: Any, engine: Engine | None = None) -> Iterator[Any]:
    """Every part of a tree; given the engine, also what Spark puts in place of some of them."""
    waiting, seen = [tree], 0
    while waiting:
        node = waiting.pop()
        seen += 1
        if seen > _NODES_MAX:
            raise RuleError(f"it has more than {_NODES_MAX} parts: make it simpler")
        yield node
        waiting += _each(node.children())
        if engine is not None and _is_a(
            engine, str(node.getClass().getName()), "RuntimeReplaceable"
        ):
            waiting.append(node.replacement())


def _each(sequence: Any) -> list[Any]:
    return [sequence.apply(at) for at in range(sequence.size())]


def _name(node: Any) -> str:
    return str(node.getClass().getName()).rsplit(".", 1)[-1].rsplit("$", 1)[-1]
