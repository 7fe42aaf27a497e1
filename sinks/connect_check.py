"""Trying the destinations of a configuration: ``python -m sinks.connect_check CONFIG DEADLINE_S``.

``walbrook config check --connect`` starts it. It prints one JSON object per sink, and changes
nothing at any destination.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import orjson

from cdc.config import Config, SinkConfig, load
from cdc.probing import ProbeResult, probe_all
from sinks import ClaimPlace, Queue, open_sink
from sinks.base import probe


def check_sinks(config: Config, deadline_s: float) -> list[ProbeResult]:
    """What was found at the destination of each active sink."""
    active = [sink for sink in config.sinks if sink.status == "active"]
    return probe_all({sink.name: _look(config, sink) for sink in active}, deadline_s)


def _look(config: Config, sink: SinkConfig) -> Callable[[], str]:
    def look() -> str:
        opened = open_sink(
            sink.destination,
            consumer=sink.name,
            batch_size=sink.effective_batch_size,
            queue=Queue.of(sink, sink.database, config.state_dsn()),
            claims=ClaimPlace.of(sink, config.state_dsn()),
            state_dsn=config.state_dsn(),
        )
        try:
            return probe(opened)
        finally:
            opened.close()

    return look


def main() -> None:
    path, deadline_s = sys.argv[1:]
    for found in check_sinks(load(Path(path)), float(deadline_s)):
        print(orjson.dumps(asdict(found)).decode())


if __name__ == "__main__":
    main()
