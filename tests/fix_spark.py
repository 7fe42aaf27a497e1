"""One Spark session for all tests of a process, on two cores of this machine.

A process has one session at a time: a test that wants another one stops this one first, and the
next test that asks for it gets a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from cdc.config import Spark
from spark_pipeline.jvm.jvm import end_jvm
from spark_pipeline.session.session import open_session


class LocalSpark:
    """The session, opened when it is first asked for, and again after its JVM has ended."""

    def __init__(self, scratch: Path) -> None:
        self._settings = Spark(
            master="local[2]", driver_memory="512m", checkpoint_directory=scratch
        )
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        if self._session is None or not _jvm_answers():
            _clear_away()
            self._session = open_session(self._settings)
        return self._session

    def stop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.stop()


def _jvm_answers() -> bool:
    """Whether it gives the right answer: one that came too late is taken for the next one's."""
    jvm = SparkContext._jvm
    try:
        return jvm is not None and getattr(jvm, "java.lang.Integer").parseInt("20") == 20
    except Exception:
        return False


def _clear_away() -> None:
    """Remove what a test left that was cut off: a context that runs, or a JVM that is gone."""
    with suppress(Exception):
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
    if SparkContext._gateway is not None and not _jvm_answers():
        end_jvm()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None


@pytest.fixture(scope="session")
def local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSpark]:
    made = LocalSpark(tmp_path_factory.mktemp("spark"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def spark(local_spark: LocalSpark) -> SparkSession:
    return local_spark.session()
