"""The Spark driver as a process: ``python -m spark_pipeline CONFIG --term SOURCE=N …``.

Started by the supervisor, which holds the other end of our standard input: when it dies, so do we.
A source that becomes ready later comes as a line ``SOURCE=N`` on standard input, another
configuration as a line ``revision N``: CONFIG has it then.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import queue
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.stop import StopSignal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.config import Config

_SWITCH_S = 0.001
_COLLECTED_AT = 5_000
"""New objects until the first look for those that refer to each other: a range makes hundreds."""
_ARROW_POOL = "ARROW_DEFAULT_MEMORY_POOL"
_M_ARENA_MAX, _ARENAS = -8, 2
_EVER_S = 1e9  # no second sign is expected


def main() -> int:
    # Importing Spark takes seconds; a stop that comes in the meantime must be heard.
    stop = StopSignal()
    stop.on_signals()
    # Threads hand each change on to the next: none may keep the interpreter for long.
    sys.setswitchinterval(_SWITCH_S)
    _share_free_memory()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    stop.on_parent_death(lines.put)
    return run(stop, lines)


def _share_free_memory() -> None:
    """Let all threads use the same free memory.

    Each worker is a thread, and allocators keep what a thread has freed for that thread. The Python
    workers, which inherit the environment, decode much in one thread: they keep Arrow's own
    allocator, which is faster there.
    """
    is_given = _ARROW_POOL in os.environ
    os.environ.setdefault(_ARROW_POOL, "system")
    import pyarrow as pa

    pa.default_memory_pool()  # chosen now, once and for all
    if not is_given:
        del os.environ[_ARROW_POOL]
    with suppress(AttributeError):  # a C library that has no such thing
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def run(stop: StopSignal, lines: queue.SimpleQueue[str]) -> int:
    """Serve the sources whose terms are given, now or later by ``lines``, until ``stop``."""
    import structlog

    from cdc.config import load
    from cdc.errors import ConfigError
    from cdc.logs import configure_logs
    from cdc.metrics.snapshot import begin_snapshots
    from cdc.pulse import Pulse
    from spark_pipeline.feed.cluster import executor_environment
    from spark_pipeline.jvm.jvm import NoiseStream
    from spark_pipeline.jvm.late import LateSession
    from spark_pipeline.session.expressions_check import has_expressions
    from spark_pipeline.session.session import open_session, stop_session
    from spark_pipeline.slices.exchange import sweep_shared_memory
    from spark_pipeline.stage.sources import Sources, needs_spark_first

    # What was imported stays: looking through it again and again only makes changes wait.
    gc.freeze()
    gc.set_threshold(_COLLECTED_AT)
    parser = argparse.ArgumentParser(prog="spark_pipeline")
    parser.add_argument("config", type=Path)
    parser.add_argument("--term", action="append", default=[], metavar="SOURCE=N")
    parser.add_argument("--base", type=Path, help="where relative paths in CONFIG begin")
    parser.add_argument("--revision", type=int, help="what CONFIG is in walbrook.configurations")
    parser.add_argument("--pulse", type=int, help="descriptor for the sign that Spark is up")
    arguments = parser.parse_args()

    def loaded() -> Config:
        return load(arguments.config, base=arguments.base)

    config = loaded()
    configure_logs(config.service)
    begin_snapshots()
    logger = structlog.get_logger("walbrook.driver")
    terms = dict(pair.rsplit("=", 1) for pair in arguments.term)
    sweep_shared_memory()
    logger.info("spark.starting", master=config.spark.master)

    def opened() -> SparkSession:
        session = open_session(config.spark, executor_environment(config))
        try:
            if has_expressions(config):
                _check_expressions(session, config)
        except ConfigError:
            stop_session(session)
            raise
        Pulse(arguments.pulse).beat(_EVER_S)
        return session

    with redirect_stderr(NoiseStream()):
        spark = LateSession()
        opening = threading.Thread(target=spark.open, args=(opened,), name="spark-start")
        opening.start()
        if needs_spark_first(config):
            opening.join()
        sources = Sources(spark, config, stop, arguments.revision)
        if spark.failure is None:
            for source, term in terms.items():
                sources.begin(source, int(term))
        failures = sources.run(lines, loaded)
        opening.join()
        if spark.current is not None:
            stop_session(spark.current)
    return _ended(failures)


def _check_expressions(session: SparkSession, config: Config) -> None:
    """Raises ConfigError for what no change of a table can mend."""
    import structlog

    from spark_pipeline.session.expressions_check import check_config

    logger = structlog.get_logger("walbrook.driver")
    found = check_config(session, config)
    for unchecked in found.unchecked:
        logger.warning("expressions.unchecked", what=unchecked)
    # A table may have changed since: that holds back its consumers alone.
    for unfit in found.unfit:
        logger.error("expressions.unfit", error=unfit)
    found.raise_problems(unfit=False)


def _ended(failures: Sequence[Exception]) -> int:
    """Say why the driver ends, and by its status whether starting it again can help."""
    from cdc.errors import exit_status
    from cdc.logs import log_end
    from spark_pipeline.delivery.isolate import as_walbrook_error

    for failure in failures:
        log_end("driver", as_walbrook_error(failure))
    return max((exit_status(failure) for failure in failures), default=0)


if __name__ == "__main__":
    sys.exit(main())
