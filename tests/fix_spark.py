"""One Spark session for all tests of a process, on two cores of this machine.

A process has one session at a time: a test that wants another one stops this one first, and the
next test that asks for it gets a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.config import Spark
from spark_pipeline.session.session import open_session


class LocalSpark:
    """The session, opened when it is first asked for."""

    def __init__(self, scratch: Path) -> None:
        self._settings = Spark(
            master="local[2]", driver_memory="512m", checkpoint_directory=scratch
        )
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        if self._session is None:
            self._session = open_session(self._settings)
        return self._session

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._session = None


@pytest.fixture(scope="session")
def local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSpark]:
    made = LocalSpark(tmp_path_factory.mktemp("spark"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def spark(local_spark: LocalSpark) -> SparkSession:
    return local_spark.session()
