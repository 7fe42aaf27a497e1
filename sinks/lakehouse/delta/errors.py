"""What an error of Delta's library or of its store means for delivery.

Invariant: ``what`` quotes no value of a row and no secret. The library's own words are the detail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cdc.errors import OperatorError, WalbrookError
from sinks.directory import disk_error
from sinks.lakehouse.delta import library as delta
from sinks.lakehouse.store_errors import refused_by_store, unavailable
from sinks.lakehouse.table import ConflictError

_CONFLICTS: Final = (
    "concurrent transaction",
    "Concurrent transaction",
    "already exists",
    "Max commit attempts",
    "newer version",
)


def from_delta(error: Exception, place: str) -> WalbrookError:
    """The error of a delivery into the table at ``place``."""
    said = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return disk_error(Path(place), error)
    if isinstance(error, delta.DeltaProtocolError):
        return OperatorError(
            f"the table at {place} uses features of Delta that the sink cannot write",
            fix="take them out of the table's protocol, or give the sink another path",
            detail=said,
        )
    if isinstance(error, delta.CommitFailedError) or any(part in said for part in _CONFLICTS):
        return ConflictError(
            f"another writer has changed the table at {place}",
            fix="it is retried",
            detail=said,
        )
    return refused_by_store(said, place) or unavailable(error, place)
