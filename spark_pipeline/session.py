"""The Spark session, with the settings that low latency needs.

docs/architecture.md says what those gave that were measured one by one; the others keep Spark from
doing what a small local job does not need. ``spark.conf`` of the configuration comes last and wins.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from cdc.config import Spark
from spark_pipeline.source import WalbrookDataSource

_STREAMING = "org.apache.spark.sql.execution.streaming"

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
    # A service runs for months: nothing is kept for a page that nobody looks at.
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
}


_LOGGING = Path(__file__).with_name("log4j2.properties")


def open_session(settings: Spark) -> SparkSession:
    """The service's session, with the source registered."""
    # Spark starts its Python workers with whatever python3 it finds, unless told.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    own = {
        "spark.driver.memory": settings.driver_memory,
        "spark.ui.enabled": str(settings.ui).lower(),
        "spark.sql.warehouse.dir": str(Path(settings.checkpoint_directory) / "warehouse"),
        # Without the stack a query stopped in mid-batch overflows it. The JVM plans and waits; what
        # the second compiler would win there it first takes away in CPU.
        "spark.driver.extraJavaOptions": (
            f"-Xss8m -XX:TieredStopAtLevel=1 -Dlog4j2.configurationFile={_LOGGING.as_uri()} "
            f"-Dwalbrook.spark.level={settings.log_level}"
        ),
    }
    if settings.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        own |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.master(settings.master).appName(settings.app_name)
    for name, value in (own | _SETTINGS | settings.conf).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(settings.log_level)
    session.dataSource.register(WalbrookDataSource)
    return session
