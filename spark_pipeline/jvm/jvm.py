"""Starting Spark's JVM so that all it prints comes out in the service's own form.

The JVM and, through it, the Python workers write into one pipe, which a thread reads for as long as
the JVM lives. Invariant: secrets reach the JVM after it has started, never among its
arguments, which everyone on the machine can read.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from typing import TextIO

import structlog
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from cdc.errors import OperatorError, TransientError
from spark_pipeline.jvm.jvm_output import Noise

_LAST_LINES = 20
_LINE_MAX = 1 << 16
_END_S = 5.0
_SHELL_SIGNAL = 128
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
    try:
        gateway = _launch(conf)
    except OperatorError:
        # A killed start script looks like a refusal, so the start is retried once.
        gateway = _launch(conf)
    SparkContext._ensure_initialized(gateway=gateway)


def end_jvm() -> None:
    """Kill the JVM of this process, which may hang: its callers get an error."""
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if isinstance(process, subprocess.Popen):
        process.kill()


def _launch(conf: SparkConf) -> object:
    """One try to start the JVM, with all that it prints relayed."""
    reading, writing = os.pipe()
    relay = Relay(os.fdopen(reading, errors="replace"))
    try:
        return launch_gateway(conf, {"stdout": writing, "stderr": writing})  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as error:
        os.close(writing)
        writing = -1
        relay.join()
        if _was_killed(error):
            raise TransientError(
                "Spark's JVM was killed while it started",
                fix="it is started again; if it is killed again, look for the out-of-memory killer "
                "in the system's log, and lower spark.driver_memory",
            ) from None
        raise OperatorError(
            f"Spark's JVM did not start: {relay.last_words()}",
            fix="correct the spark section of the configuration; spark.log_level and "
            "service.log_level debug show more",
        ) from None
    finally:
        if writing >= 0:
            os.close(writing)


def _was_killed(error: PySparkRuntimeError) -> bool:
    """Whether a signal ended the JVM: one that refuses its settings ends by itself, and says why.

    Spark keeps the process to itself; only the frame that waited for it has it.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        process = frame.f_locals.get("proc")
        if isinstance(process, subprocess.Popen):
            status = process.wait(_END_S)
            return status < 0 or status > _SHELL_SIGNAL  # the shell that starts it adds 128
    return False


class Relay(threading.Thread):
    """Reads what is printed to a pipe, line by line, until its other end is closed."""

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
