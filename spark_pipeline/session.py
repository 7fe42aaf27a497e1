"""The Spark session, with the settings that low latency needs.

Each of them was measured; docs/architecture.md says what it gave. ``spark.conf`` of the
configuration is applied last and wins.
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
    # Without this a query stopped in mid-batch overflows the stack.
    "spark.driver.extraJavaOptions": "-Xss8m -XX:+UseG1GC",
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
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
}


def open_session(settings: Spark) -> SparkSession:
    """The service's session, with the source registered."""
    # Spark starts its Python workers with whatever python3 it finds, unless told.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(settings.master)
        .appName(settings.app_name)
        .config("spark.driver.memory", settings.driver_memory)
        .config("spark.ui.enabled", str(settings.ui).lower())
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(Path(settings.checkpoint_directory) / "warehouse"))
    )
    for name, value in (_SETTINGS | settings.conf).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(settings.log_level)
    session.dataSource.register(WalbrookDataSource)
    return session
