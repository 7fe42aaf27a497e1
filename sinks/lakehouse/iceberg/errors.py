"""What an error of a catalog, of its library or of its store means for delivery.

Invariant: ``what`` quotes no value of a row and no secret. The library's own words are the detail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cdc.errors import OperatorError, TransientError, WalbrookError
from sinks.directory import disk_error
from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.disk import path_of
from sinks.lakehouse.store_errors import refused_by_store
from sinks.lakehouse.table import ConflictError

_CONFLICTS: Final = (iceberg.CommitFailedException, iceberg.TableAlreadyExistsError)
_REFUSED: Final = (iceberg.UnauthorizedError, iceberg.ForbiddenError, iceberg.OAuthError)


def from_iceberg(error: Exception, place: str) -> WalbrookError:
    """The error of a delivery into the table at ``place``."""
    said = str(error)
    if isinstance(error, _CONFLICTS):
        return ConflictError(
            f"another writer has changed the table at {place}", fix="it is retried", detail=said
        )
    if isinstance(error, _REFUSED):
        return OperatorError(
            f"the catalog of the table at {place} refuses the sink",
            fix="correct catalog of the destination, and let that account create and commit tables",
            detail=said,
        )
    if isinstance(error, (ImportError, iceberg.NotInstalledError)):
        return OperatorError(
            f"the catalog or the store of the table at {place} needs a package that is not "
            "installed",
            fix="install it: boto3 for catalog.type glue, pyiceberg[hive] for hive",
            detail=said,
            kind="missing_package",
        )
    if (refused := refused_by_store(said, place)) is not None:
        return refused
    if isinstance(error, OSError) and error.errno is not None and "://" not in _remote(place):
        return disk_error(path_of(place), error)
    return TransientError(
        f"the table at {place} cannot be written now ({type(error).__name__})",
        fix="it is retried; check that its catalog and its store can be reached",
        detail=said,
    )


def _remote(place: str) -> str:
    return place.removeprefix("file://")


@contextmanager
def telling(place: str) -> Iterator[None]:
    """Errors of the library are ours, with what to do."""
    try:
        yield
    except WalbrookError:
        raise
    except Exception as error:
        # Each catalog raises what its client raises: requests, SQLAlchemy, boto3, Thrift.
        raise from_iceberg(error, place) from error
