"""Having the expressions of a configuration checked by those who can: a process with Spark.

It takes seconds to start, so it is started only for a configuration that has expressions. What it
cannot look at (no Java, a source that does not answer) is said, not taken for right or wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cdc.config import Config
from cdc.errors import NEEDS_OPERATOR, ConfigError, OperatorError
from cdc.service.process.java import require_java

_TIMEOUT_S = 300.0
_MARK = "walbrook: "


def check_expressions(config: Config, path: Path) -> list[str]:
    """What could not be checked; ConfigError for what is wrong."""
    active = [sink for sink in config.sinks if sink.status == "active"]
    if not any(sink.expressions or sink.window for sink in active):
        return []
    try:
        require_java()
    except OperatorError as error:
        return [f"the expressions: {error}"]
    command = [sys.executable, "-m", "spark_pipeline.session.config_check", str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"the expressions: Spark gave no answer in {_TIMEOUT_S:.0f} s"]
    _, found, problems = done.stderr.partition(_MARK)
    if done.returncode == NEEDS_OPERATOR and found:
        raise ConfigError(problems.strip())
    if done.returncode:
        last = next(iter(reversed(done.stderr.strip().splitlines())), "it said nothing")
        return [f"the expressions: the check ended with status {done.returncode}: {last}"]
    unchecked = [line for line in done.stdout.splitlines() if line.startswith("not checked: ")]
    return [line.removeprefix("not checked: ") for line in unchecked]
