"""An error that came through Spark, as one of ours.

Spark hands on what was raised on an executor as text, with the stacks of every process it passed.
"""

from __future__ import annotations

import re

from cdc.errors import CorruptionError, TransientError, WalbrookError
from spark_pipeline.noise import said, short

_OURS = re.compile(r"^(?:.*: )?cdc\.errors\.(\w+): (.+)$", re.MULTILINE)


def told(error: Exception) -> WalbrookError:
    """What our own code said in a worker, else the one line of the rest that says most.

    Only damage keeps its class: everything else is tried again all the same.
    """
    if isinstance(error, WalbrookError):
        return error
    text = str(error).strip()
    ours = _OURS.findall(text)
    if not ours:
        return TransientError(f"{type(error).__name__}: {short(said(text))}")
    name, what = ours[-1]
    return CorruptionError(what) if name == CorruptionError.__name__ else TransientError(what)
