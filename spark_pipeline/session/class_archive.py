"""Spark's classes, laid out for the JVM: ``python -m spark_pipeline.session.class_archive``.

Half of a start of the driver is the JVM reading some fifteen thousand classes out of Spark's jars.
Java can keep them in a file as it needs them in memory (class data sharing); written once, beside
the installed packages, it is used by every session that is opened.

Invariant: the file only ever makes a start faster. Without it, and with one that was
written for another Java or other jars, the JVM reads the jars.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from cdc.config import Spark
from cdc.cursor import Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import OperatorError
from cdc.log.writer import LogWriter
from spark_pipeline.jvm.arrow_map import map_in_arrow
from spark_pipeline.session.session import CLASS_ARCHIVE, open_session, stop_session

_WRITTEN_WITHIN_S = 120.0
_BATCH_WITHIN_S = 60


def write_class_archive(archive: Path = CLASS_ARCHIVE) -> None:
    """Start Spark, have it do a little of what the service does, and keep the classes it took."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        written = scratch / "classes.jsa"
        session = open_session(
            Spark(
                master="local[1]",
                checkpoint_directory=scratch / "spark",
                driver_java_options=f'-XX:ArchiveClassesAtExit="{written}"',
            )
        )
        _serve_a_little(session, scratch)
        stop_session(session)
        _end_jvm()
        if not written.is_file():
            raise OperatorError(
                "this Java wrote no archive of classes",
                fix="go on without it: Spark only starts more slowly",
            )
        # Whole or not at all: a driver may be starting just now.
        beside = archive.with_suffix(f".{os.getpid()}")
        shutil.copyfile(written, beside)
        beside.replace(archive)


def _serve_a_little(session: SparkSession, scratch: Path) -> None:
    """One micro-batch through a query, a job with Python in it, and an expression."""
    log = LogWriter(scratch / "log")
    end = Cursor(8, 0)
    log.append(pa.RecordBatch.from_pylist([], schema=RAW_SCHEMA), {}, first=end, high=end)
    query = (
        session.readStream.format("walbrook")
        .option("path", str(scratch / "log"))
        .load()
        .writeStream.option("checkpointLocation", str(scratch / "checkpoint"))
        .trigger(availableNow=True)
        .foreachBatch(_collect)
        .start()
    )
    query.awaitTermination(_BATCH_WITHIN_S)
    query.stop()
    log.close()
    rows = session.createDataFrame(pa.table({"id": [1, 2], "name": ["a", None]}))
    _collect(map_in_arrow(rows, _unchanged, rows.schema), 0)
    _collect(rows.selectExpr("to_json(struct(id, upper(name) AS name)) AS j").filter("id > 1"), 0)


def _collect(frame: DataFrame, _batch: int) -> None:
    frame.collect()


def _unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def _end_jvm() -> None:
    """It ends with its standard input, and writes the file on its way."""
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    process: subprocess.Popen[bytes] = gateway.proc
    assert process.stdin is not None
    process.stdin.close()
    process.wait(_WRITTEN_WITHIN_S)


def main() -> int:
    try:
        write_class_archive()
    except OperatorError as error:
        print(f"walbrook: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
