"""A JVM that does not start says why, and a Python that is not there is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.config import Spark
from cdc.errors import FAILED, OperatorError
from cdc.service.process.java import find_java
from spark_pipeline.session.session import _own, open_session

ROOT = Path(__file__).parents[3]
START = """
import sys
from cdc.config import Spark
from cdc.errors import OperatorError
from spark_pipeline.session.session import open_session
try:
    open_session(Spark(driver_java_options="-javaagent:/nowhere/agent.jar"))
except OperatorError as error:
    sys.exit(f"refused: {error}")
"""
# First the script's own JVM is killed, then, at the second try, Spark's.
KILLED_JAVA = """#!/bin/sh
case "$*" in
  *launcher.Main*) [ -e {mark} ] && exec {real}/bin/java "$@"; touch {mark};;
esac
kill -9 $$
"""
KILLED = """
import sys
from cdc.config import Spark
from cdc.errors import WalbrookError, exit_status
from spark_pipeline.session.session import open_session
try:
    open_session(Spark(checkpoint_directory=sys.argv[1]))
except WalbrookError as error:
    print(error)
    sys.exit(exit_status(error))
"""


@pytest.mark.timeout(120)
def test_a_jvm_that_does_not_start_says_why() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert answer.stderr.strip().startswith("refused: Spark's JVM did not start"), answer
    assert "/nowhere/agent.jar" in answer.stderr


@pytest.mark.timeout(120)
def test_a_jvm_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(KILLED_JAVA.format(real=find_java(), mark=tmp_path / "mark"))
    java.chmod(0o755)
    answer = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "spark")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAVA_HOME": str(tmp_path)},
        check=False,
    )
    assert answer.returncode == FAILED, answer
    assert "Spark's JVM was killed while it started" in answer.stdout


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(OperatorError, match="/nowhere/python, which is not a program on this host"):
        open_session(Spark(executor_python="/nowhere/python"))


def test_a_setting_with_a_key_reaches_spark_by_its_name() -> None:
    settings = Spark(
        master="spark://far.example:7077",
        driver_host="here.example",
        driver_java_options="-Da=b",
        executor_memory="3g",
        executor_cores=2,
        max_cores=8,
        executor_java_options="-Dc=d",
    )
    conf = _own(settings, {"NAME": "value"})
    assert conf["spark.driver.extraJavaOptions"].endswith("-Da=b")
    assert "-Xss8m" in conf["spark.driver.extraJavaOptions"]
    expected = {
        "spark.driver.host": "here.example",
        "spark.driver.bindAddress": "0.0.0.0",
        "spark.executor.memory": "3g",
        "spark.executor.cores": "2",
        "spark.cores.max": "8",
        "spark.executor.extraJavaOptions": "-Dc=d",
        "spark.executorEnv.NAME": "value",
    }
    assert expected.items() <= conf.items()
    assert "spark.executor.instances" not in conf
    here = _own(Spark(), {"NAME": "value"})
    assert here["spark.driver.host"] == "127.0.0.1"
    assert not [name for name in here if name.startswith("spark.executor")]
