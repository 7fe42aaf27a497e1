"""Starting what serves the consumers in event-time order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pyspark.sql import SparkSession

from cdc.config import Config
from cdc.replication.stop import StopSignal
from spark_pipeline.eventtime.stage import EventStage
from spark_pipeline.lanes import SourceLanes
from spark_pipeline.settings import LaneSettings


def start_stages(
    spark: SparkSession,
    config: Config,
    settings: Sequence[LaneSettings],
    lanes: Sequence[SourceLanes],
    stop: StopSignal,
) -> list[threading.Thread]:
    """A thread for each of them; ``lanes`` are those of the same sources."""
    by_source = {each.source: each for each in settings}
    queues = {each.source: lane.queues for each, lane in zip(settings, lanes, strict=True)}
    threads = []
    for sink in config.sinks:
        if sink.ordering != "event_time" or sink.status != "active":
            continue
        stage = EventStage(spark, config, sink, by_source, queues, stop)
        threads.append(
            threading.Thread(
                target=stage.run,
                args=(config.service.drain_timeout_s,),
                name=f"event-time-{sink.name}",
            )
        )
    for thread in threads:
        thread.start()
    return threads
