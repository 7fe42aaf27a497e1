"""The filters of a source's sinks on one change of its log, as a process:
``python -m spark_pipeline.session.filters_of_change CONFIG SOURCE CURSOR``.

``walbrook trace --evaluate`` starts it. It prints one JSON object: by sink ``PASSES``,
``KEEPS_BACK`` or ``FAILED``. Sinks that do not take the change, or have no filter, are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import orjson
from pyspark.sql import SparkSession

from cdc.config import Config, SinkConfig, Spark, load
from cdc.cursor import Cursor
from cdc.errors import WalbrookError, exit_status
from cdc.log.open import open_log
from spark_pipeline.expressions.compiled import Expressions
from spark_pipeline.expressions.log_range import LogRange
from spark_pipeline.expressions.on_executors import verdicts_on_driver
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.session.session import open_session
from spark_pipeline.slices.raw_rows import LogSlice


def main() -> int:
    parser = argparse.ArgumentParser(prog="spark_pipeline.session.filters_of_change")
    parser.add_argument("config", type=Path)
    parser.add_argument("source")
    parser.add_argument("cursor", type=Cursor.parse)
    given = parser.parse_args()
    try:
        said = filters_of_change(load(given.config), given.source, given.cursor)
    except WalbrookError as error:
        print(f"walbrook: {error}", file=sys.stderr)
        return exit_status(error)
    print(orjson.dumps(said).decode())
    return 0


def filters_of_change(config: Config, source: str, cursor: Cursor) -> dict[str, str]:
    """What each filter says of the change at a cursor."""
    sinks = [sink for sink in config.sinks_of(source) if "filter" in sink.expressions]
    with tempfile.TemporaryDirectory() as scratch:
        session = None
        if any(_needs_spark(sink) for sink in sinks):
            spark = Spark(master="local[1]", checkpoint_directory=Path(scratch), log_level="OFF")
            session = open_session(spark)
        try:
            said = {sink.name: _verdict(session, config, source, sink, cursor) for sink in sinks}
        finally:
            if session is not None:
                session.stop()
    return {name: verdict for name, verdict in said.items() if verdict is not None}


def _needs_spark(sink: SinkConfig) -> bool:
    expressions = Expressions.of(sink)
    return expressions is not None and bool(expressions.sql)


def _verdict(
    session: SparkSession | None, config: Config, source: str, sink: SinkConfig, cursor: Cursor
) -> str | None:
    settings = StageSettings.of(config, config.database(source), term=0)
    with closing(open_log(settings.log_directory)) as log:
        batch, history = log.seek(cursor), log.history()
        (entry,) = log.entries(batch, batch + 1)
    verdicts = verdicts_on_driver(
        session,
        LogRange(
            sink,
            settings.origin,
            settings.log_directory,
            history,
            [LogSlice(batch, 0, int(entry["rows"]))],
            since=cursor,
            until=Cursor(cursor.lsn, cursor.idx + 1),
        ),
    )
    if not verdicts.num_rows:
        return None
    if verdicts.column("error")[0].is_valid:
        return "FAILED"
    return "PASSES" if verdicts.column("keep")[0].as_py() else "KEEPS_BACK"


if __name__ == "__main__":
    sys.exit(main())
