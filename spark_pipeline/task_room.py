"""How many tasks Spark runs at once on this machine: more than it has cores. Pure.

A delivery whose destination does not answer needs no core, but Spark counts one for it until it
ends, and long after the others have stopped waiting for it. As many such as there are cores, and
nothing else would run. What must always hold: work is cut for the cores there are; beside them
there is room for as many deliveries as may be under way at once. On a cluster the operator says how
many tasks an executor takes.
"""

from __future__ import annotations

import os
import re

from cdc.config.hosts import is_cluster

_LOCAL = re.compile(r"local(?:\[\s*(\*|\d+)\s*(,[^\]]*)?\])?")


def with_room(master: str, deliveries: int) -> tuple[str, dict[str, str]]:
    """The master that Spark is given, and the setting that says for how many work is cut."""
    if is_cluster(master) or (found := _LOCAL.fullmatch(master)) is None:
        return master, {}
    given, failures = found.groups()
    cores = len(os.sched_getaffinity(0)) if given == "*" else int(given or 1)
    room = f"local[{cores + deliveries}{failures or ''}]"
    return room, {"spark.default.parallelism": str(cores)}
