"""Spark's evaluator of expressions, in a session of its own and without a job.

An expression is analyzed and optimized once for a table version; what comes of it is the same code
that a task would run. Here it is run on the driver over an Arrow stream, handed to the JVM and
back in a call each: a few rows take milliseconds, where planning a query for them takes tens.

Invariant: the session's settings are ours, whatever ``spark.conf`` says: ANSI errors, UTC,
names as Postgres spells them, and no functions but Spark's own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from spark_pipeline.expressions.failures import EvaluationError

_SETTINGS: Final = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.caseSensitive": "true",
    "spark.sql.execution.arrow.useLargeVarTypes": "false",
}
_ANSWER_ROWS_MAX: Final = 1 << 30
_ANSWER_BYTES_MAX: Final = 1 << 30
_MESSAGE_MAX: Final = 300
_CONDITION: Final = re.compile(r"\[[A-Z][A-Z0-9_.]*\]")
_ARROW: Final = "org.apache.spark.sql.execution.arrow.ArrowConverters$"
_PROJECTION: Final = "org.apache.spark.sql.catalyst.expressions.UnsafeProjection$"

_engines: WeakKeyDictionary[SparkContext, Engine] = WeakKeyDictionary()
_making = threading.Lock()


class Engine:
    """What expressions of one Spark context are analyzed and evaluated with."""

    def __init__(self, spark: SparkSession) -> None:
        # It would print every error with the data of its row, while bad rows are looked for.
        PySparkLogger.getLogger("SQLQueryContextLogger").setLevel("CRITICAL")
        self.session = spark
        self.session = self.new_session()
        self.jvm: Any = self.session._jvm

    @classmethod
    def of(cls, spark: SparkSession) -> Engine:
        """The engine of a session's context, made when it is first needed."""
        with _making:
            context = spark.sparkContext
            if context not in _engines:
                _engines[context] = cls(spark)
            return _engines[context]

    def new_session(self, settings: Mapping[str, str] | None = None) -> SparkSession:
        """A session with our settings, and these."""
        session = self.session.newSession()
        for name, value in (_SETTINGS | dict(settings or {})).items():
            session.conf.set(name, value)
        return session

    def frame(self, schema: pa.Schema) -> DataFrame:
        """No rows of these columns, in a form that the optimizer does not see through."""
        session: Any = self.session._jsparkSession
        wanted = self.jvm.org.apache.spark.sql.types.DataType.fromJson(
            from_arrow_schema(schema).json()
        )
        empty = self.session.sparkContext._jsc.emptyRDD()
        return DataFrame(session.createDataFrame(empty, wanted), self.session)

    def singleton(self, name: str) -> Any:
        """An object of Spark's Scala code."""
        return getattr(getattr(self.jvm, name), "MODULE$")


class Projection:
    """Columns over rows of one schema, ready to run; one caller at a time."""

    def __init__(
        self,
        engine: Engine,
        schema: pa.Schema,
        columns: list[Column],
        frame: DataFrame | None = None,
    ) -> None:
        """``frame`` is of ``schema``, if the columns are of one already."""
        chosen: Any = (frame or engine.frame(schema)).select(*columns)
        plan = chosen._jdf.queryExecution().optimizedPlan()
        self._project = engine.singleton(_PROJECTION).create(
            plan.projectList(), plan.child().output()
        )
        self._taken = to_arrow_schema(from_arrow_schema(schema), timezone="UTC")
        self._given = chosen._jdf.schema()
        self._converters = engine.singleton(_ARROW)
        self._running = threading.Lock()

    def run(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The answers for all rows, in their order; EvaluationError if there is none for some."""
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, self._taken) as writer:
            writer.write_batch(rows.cast(self._taken))
        with self._running:
            try:
                parts = self._answers(bytearray(stream.getvalue()))
            except (PySparkException, Py4JJavaError) as error:
                condition = condition_of(error)
                detail = spark_says(error).removeprefix(condition).lstrip()
                raise EvaluationError(condition, detail=detail) from None
        tables = [pa.ipc.open_stream(part).read_all() for part in parts]
        (batch,) = pa.concat_tables(tables).combine_chunks().to_batches()
        return batch

    def _answers(self, stream: bytearray) -> list[bytes]:
        """What Spark says of an Arrow stream, as Arrow streams; it keeps no memory of either."""
        rows = self._converters.fromIPCStream(stream)._1()
        try:
            answers = self._converters.toBatchWithSchemaIterator(
                rows.map(self._project),
                self._given,
                _ANSWER_ROWS_MAX,
                _ANSWER_BYTES_MAX,
                "UTC",
                True,
                False,
            )
            try:
                parts = [bytes(answers.next())]
                while answers.hasNext():
                    parts.append(bytes(answers.next()))
                return parts
            finally:
                answers.close()
        finally:
            rows.close()


def condition_of(error: Exception) -> str:
    """Spark's name for what is wrong, such as [CAST_INVALID_INPUT]: it quotes no row."""
    found = _CONDITION.match(spark_says(error))
    return found[0] if found else type(error).__name__


def spark_says(error: Exception) -> str:
    """Spark's own message, without what no reader of ours can use; it may quote a row."""
    text = str(error).strip()
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception.getMessage() or error.java_exception.toString()).strip()
    line = next(iter(text.splitlines()), type(error).__name__)
    line = line.partition(" SQLSTATE:")[0].partition(" If necessary set ")[0].rstrip(" ;.")
    return line if len(line) <= _MESSAGE_MAX else line[:_MESSAGE_MAX] + "…"
