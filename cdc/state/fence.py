"""The fence around a source's rows: who is not the latest start of the service writes nothing."""

from __future__ import annotations

from cdc.errors import OperatorError

FENCE = "SELECT 1 FROM walbrook.sources WHERE name = %s AND term = %s FOR SHARE"
"""Inside a transaction: no row means fenced; else nobody can take over before it ends."""

FENCE_TO_MOVE = "SELECT 1 FROM walbrook.sources WHERE name = %s AND term = %s FOR NO KEY UPDATE"
"""The same for those who then move the restart cursor: they come one after another."""


def fenced(source: str) -> OperatorError:
    return OperatorError(
        f"another start of the service has taken over source {source}",
        fix="stop this one; two services must not serve one source",
        kind="fenced",
    )
