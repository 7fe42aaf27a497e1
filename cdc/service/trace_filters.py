"""Having sinks' filters evaluated on one change by a process that can: it may need Spark.

Invariant: a filter that could not be evaluated is an error that says why, never an answer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import orjson

from cdc.config import load
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.service.process.java import require_java
from cdc.trace.conclusion import Filtering

_TIMEOUT_S: Final = 300.0


def evaluate_filters(config: Path, source: str, cursor: Cursor) -> dict[str, Filtering]:
    """What the filters of a source's sinks say of the change at a cursor, by sink."""
    sinks = load(config).sinks_of(source)
    if not any("filter" in sink.expressions for sink in sinks):
        return {}
    require_java()
    module = "spark_pipeline.session.filters_of_change"
    command = [sys.executable, "-m", module, str(config), source, str(cursor)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OperatorError(
            f"the filters were not evaluated: Spark gave no answer in {_TIMEOUT_S:.0f} s",
            fix="try again, or trace without --evaluate",
        ) from None
    if done.returncode:
        last = next(iter(reversed(done.stderr.strip().splitlines())), "it said nothing")
        raise OperatorError(
            f"the filters were not evaluated: the process ended with status {done.returncode}: "
            f"{last}",
            fix="correct what it says, or trace without --evaluate",
        )
    found = orjson.loads(done.stdout.splitlines()[-1])
    return {name: Filtering[said] for name, said in found.items()}
