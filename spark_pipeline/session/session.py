"""The Spark session, with the settings that low latency needs.

docs/architecture.md says what those gave that were measured one by one; the others keep Spark from
doing what a small job does not need. ``spark.conf`` of the configuration comes last and wins, but
not over what has a key of its own, which it cannot hold.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from cdc.config import Spark
from cdc.config.hosts import is_cluster, is_on_this_host
from cdc.errors import OperatorError
from cdc.log.files import make_private
from spark_pipeline.jvm.jvm import start_jvm
from spark_pipeline.source.stream import WalbrookDataSource

_logger = structlog.get_logger("walbrook.spark")
_STREAMING = "org.apache.spark.sql.execution.streaming"
_HERE = Path(__file__).parent
CLASS_ARCHIVE = Path(sys.prefix) / "share" / "walbrook" / "spark-classes.jsa"
"""Spark's classes as the JVM needs them, if ``class_archive`` has written them."""

_SETTINGS = {
    # A Python worker answers over a Unix socket in half the time.
    "spark.python.unix.domain.socket.enabled": "true",
    # The checkpoint is scratch: the cheapest way to write it will do.
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.adaptive.enabled": "false",
    "spark.locality.wait": "0s",
    "spark.scheduler.mode": "FAIR",
    "spark.scheduler.allocation.file": (_HERE / "fairscheduler.xml").as_uri(),
    # A service runs for months: nothing is kept for a page of Spark that is not open.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.sql.streaming.numRecentProgressUpdates": "5",
    "spark.sql.streaming.minBatchesToRetain": "2",
    # A body that hangs cannot be interrupted; then the process is given up, not waited for.
    "spark.sql.streaming.stopTimeout": "10s",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
    "spark.python.daemon.module": "spark_pipeline.session.python_daemon",
    "spark.executor.syncLogLevel.enabled": "true",
}

_SMALL_HEAP = (
    "-Xms48m -XX:MinHeapFreeRatio=10 -XX:MaxHeapFreeRatio=25 -XX:G1PeriodicGCInterval=60000 "
    "-XX:-UsePerfData"  # which a thread would sample twenty times a second, for jstat
)


def open_session(settings: Spark, environment: Mapping[str, str] | None = None) -> SparkSession:
    """The service's session, with the source registered; ``environment`` is for executors."""
    # Spark starts its Python workers with the first python3 it finds, unless configured. It runs
    # the executors' one on this host too, to plan.
    os.environ["PYSPARK_PYTHON"] = _python(settings)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # The only way to tell Spark's web page where to listen. The driver's host is set below.
    os.environ["SPARK_LOCAL_IP"] = settings.ui_host
    conf = _own(settings, environment or {}) | _SETTINGS | settings.conf
    # The JVM makes files with the rights that its account gives by default.
    make_private(Path(settings.checkpoint_directory))
    start_jvm(conf)
    builder = SparkSession.builder.master(settings.master).appName(settings.app_name)
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    _set_levels(session, settings)
    _register_source(session)
    return session


def _register_source(session: SparkSession) -> None:
    """Make the source known where Spark does not find it by itself (``pyspark_walbrook``)."""
    try:
        session.dataSource.register(WalbrookDataSource)
    except AnalysisException as error:
        if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
            raise


def stop_session(session: SparkSession) -> None:
    """Stop the session, if there is still a JVM to stop."""
    try:
        session.stop()
    except (Py4JError, OSError) as error:
        _logger.debug("spark.not_stopped", error=error)


def class_archive_option(archive: Path) -> str:
    """A JVM that cannot use the file, being another Java's, reads Spark's jars as without it."""
    return f'-XX:SharedArchiveFile="{archive}"' if archive.is_file() else ""


def _own(settings: Spark, environment: Mapping[str, str]) -> dict[str, str]:
    """What has a key of its own, by Spark's names."""
    logging = (_HERE / "log4j2.properties").as_uri()
    own = {
        "spark.master": settings.master,
        "spark.driver.memory": settings.driver_memory,
        "spark.ui.enabled": str(settings.ui).lower(),
        "spark.ui.port": str(settings.ui_port),
        "spark.sql.warehouse.dir": str(Path(settings.checkpoint_directory) / "warehouse"),
        # Without the stack a query stopped in mid-batch overflows it. The JVM plans and waits; what
        # the second compiler would win there it first takes away in CPU. Its heap begins small and
        # gives back what it does not need: by default it begins with a 64th of the machine.
        "spark.driver.extraJavaOptions": (
            f"-Xss8m -XX:TieredStopAtLevel=1 {_SMALL_HEAP} -Dlog4j2.configurationFile={logging} "
            f"-Dwalbrook.spark.level={settings.log_level} "
            f"{_class_archive(settings)} {settings.driver_java_options}"
        ).strip(),
    }
    if not is_cluster(settings.master):
        # Every account of this machine can reach the driver's ports, which read Java objects. Spark
        # makes a secret of its own at each start; a cluster's must be configured.
        own["spark.authenticate"] = "true"
        return own | _driver_at("127.0.0.1", bind="127.0.0.1")
    near = is_on_this_host(settings.master)
    host = settings.driver_host or ("127.0.0.1" if near else socket.gethostname())
    own |= _driver_at(host, bind="127.0.0.1" if near else "0.0.0.0")
    own |= {f"spark.executorEnv.{name}": value for name, value in environment.items()}
    given = {
        "spark.executor.memory": settings.executor_memory,
        "spark.executor.cores": settings.executor_cores,
        "spark.executor.instances": settings.executor_instances,
        "spark.cores.max": settings.max_cores,
        "spark.executor.extraJavaOptions": settings.executor_java_options or None,
    }
    return own | {name: str(value) for name, value in given.items() if value is not None}


def _class_archive(settings: Spark) -> str:
    """Ours, unless the operator speaks of one: a JVM takes no two."""
    return "" if "Archive" in settings.driver_java_options else class_archive_option(CLASS_ARCHIVE)


def _driver_at(host: str, *, bind: str) -> dict[str, str]:
    return {"spark.driver.host": host, "spark.driver.bindAddress": bind}


def _python(settings: Spark) -> str:
    python = settings.executor_python or sys.executable
    if shutil.which(python) is None:
        raise OperatorError(
            f"spark.executor_python is {python}, which is not a program on this host",
            fix="have it at the same path here as on the executors, a link will do: Spark plans "
            "with it",
        )
    return python


def _set_levels(session: SparkSession, settings: Spark) -> None:
    session.sparkContext.setLogLevel(settings.log_level)
    log4j = getattr(session.sparkContext._gateway.jvm, "org.apache.logging.log4j")  # type: ignore[union-attr]
    for logger, level in settings.log_levels.items():
        log4j.core.config.Configurator.setLevel(logger, log4j.Level.toLevel(level))
