"""What a transaction on a source's rows needs: to be of the latest start, and to last."""

from __future__ import annotations

from cdc.errors import OperatorError

FENCE = "SELECT 1 FROM walbrook.sources WHERE name = %s AND term = %s FOR SHARE"
"""Inside a transaction: no row means fenced; else no process can take over before it ends."""

FENCE_TO_MOVE = "SELECT 1 FROM walbrook.sources WHERE name = %s AND term = %s FOR NO KEY UPDATE"
"""The same for those who then move the restart cursor: they come one after another."""

IS_LATEST = "SELECT 1 FROM walbrook.sources WHERE name = %s AND term = %s"
"""For what only informs: it waits for no lock, and another process may take over before it ends."""

DURABLY = """
SELECT set_config('synchronous_commit', 'on', true)
 WHERE current_setting('synchronous_commit') = 'off'
"""
"""Inside a transaction: its commit waits for the server's disk, whatever the role's default is."""


def fenced(source: str) -> OperatorError:
    return OperatorError(
        f"another start of the service has taken over source {source}",
        fix="stop this one; two services must not serve one source",
        kind="fenced",
    )
