"""One Spark session for all tests of expressions in a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.config import Spark
from spark_pipeline.session import open_session


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    scratch: Path = tmp_path_factory.mktemp("spark")
    session = open_session(Spark(master="local[2]", checkpoint_directory=scratch))
    yield session
    session.stop()
