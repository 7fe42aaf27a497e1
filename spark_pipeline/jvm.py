"""Starting Spark's JVM so that all it prints comes out in the service's own form.

The JVM and, through it, the Python workers write into one pipe, which a thread reads for as long as
the JVM lives. What must always hold: secrets reach the JVM after it has started, never among its
arguments, which everyone on the machine can read.
"""

from __future__ import annotations

import io
import os
import re
import threading
from collections import deque
from collections.abc import Mapping
from typing import TextIO

import structlog
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from cdc.errors import OperatorError
from spark_pipeline.noise import Noise

_LAST_LINES = 20
_LINE_MAX = 1 << 16
# As Spark itself decides what its web page must not show.
_SECRET = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM of this process with what it must know from the start, if there is none."""
    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        if not _SECRET.search(name):
            conf.set(name, value)
    reading, writing = os.pipe()
    relay = Relay(os.fdopen(reading, errors="replace"))
    try:
        gateway = launch_gateway(conf, {"stdout": writing, "stderr": writing})  # type: ignore[no-untyped-call]
    except PySparkRuntimeError:
        os.close(writing)
        relay.join()
        raise OperatorError(
            f"Spark's JVM did not start: {relay.last_words()}",
            fix="correct the spark section of the configuration; spark.log_level and "
            "service.log_level debug show more",
        ) from None
    os.close(writing)
    SparkContext._ensure_initialized(gateway=gateway)


class Relay(threading.Thread):
    """Reads what is printed to a pipe, line by line, until nobody holds its other end."""

    def __init__(self, lines: TextIO) -> None:
        super().__init__(name="spark-output", daemon=True)
        self._lines = lines
        self._noise = Noise()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self.start()

    def run(self) -> None:
        with self._lines:
            while line := self._lines.readline(_LINE_MAX):
                self._last.append(line.strip())
                tell(self._noise, line)

    def last_words(self) -> str:
        """What the JVM said before it ended, without its stack."""
        said = [line for line in self._last if line and not line.startswith("at ")]
        return " ".join(said)[-1000:] or "it said nothing"


class NoiseStream(io.TextIOBase):
    """In place of a process's standard error: what libraries print there, as events."""

    def __init__(self) -> None:
        self._noise = Noise()
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                tell(self._noise, line)
        return len(text)

    def writable(self) -> bool:
        return True


def tell(noise: Noise, line: str) -> None:
    """Write the events of a line to the service's log."""
    logger = structlog.get_logger("walbrook.spark")
    for event in noise.events(line):
        getattr(logger, event.level)(event.name, **event.fields)
