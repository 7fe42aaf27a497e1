"""What all workers of a source share."""

from __future__ import annotations

import itertools
import threading
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from pyspark.sql import SparkSession

from cdc.connection_pool import ConnectionPool
from spark_pipeline.capacity.slots import Slots
from spark_pipeline.delivery.refusal_log import RefusalLog
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.jvm.late import LateSession
from spark_pipeline.workers.live import LiveTraces
from spark_pipeline.workers.settler import Settler

RUN = uuid.uuid4().hex
"""This process: executors close the sinks of earlier ones."""

_stages = itertools.count(1)


def new_run() -> str:
    """A name for one stage of this process; a stage that is started again has another one."""
    return f"{RUN}:{next(_stages)}"


@dataclass(frozen=True)
class WorkerContext:
    """``ended``: the worker stops. ``over``: no worker waits for a delivery slot any more."""

    settings: StageSettings
    feed: Feed
    settler: Settler
    connections: ConnectionPool
    scratch: Path
    spark: LateSession | None = None  # without it everything is done in the driver
    run: str = field(default_factory=new_run)
    ended: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    catch_up: Slots = field(default_factory=lambda: Slots(4))
    refusals: RefusalLog = field(default_factory=RefusalLog)
    live: LiveTraces = field(default_factory=LiveTraces)

    def with_settings(self, settings: StageSettings) -> Self:
        return replace(self, settings=settings)

    def for_worker(self, run: str | None = None) -> Self:
        """The context of one worker, which can be ended alone.

        Another ``run`` has its sinks opened again, with the settings of this context.
        """
        return replace(self, ended=threading.Event(), run=run or self.run)

    @property
    def awaits_spark(self) -> bool:
        """Whether the feed is not filled, because Spark, or its query, is not up."""
        return self.spark is not None and not self.feed.is_filled

    @property
    def session(self) -> SparkSession | None:
        """Spark, if there is any, and once it is up."""
        return None if self.spark is None else self.spark.current
