"""What the words of an object store mean for delivery, whichever client brings them.

Invariant: ``what`` quotes no value of a row and no secret. The store's own words are the detail.
"""

from __future__ import annotations

from typing import Final

from cdc.errors import OperatorError, TransientError

_REFUSALS: Final = (
    "AccessDenied",
    "ACCESS_DENIED",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "NoSuchBucket",
    "NO_SUCH_BUCKET",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "AuthorizationPermissionMismatch",
    "ContainerNotFound",
    "403 Forbidden",
    "401 Unauthorized",
    "HTTP response code 403",
    "HTTP response code 401",
    "http_status_code=403",
    "http_status_code=401",
    "Missing region",
)
_TRACE: Final = "\n\nDebug source"


def refused_by_store(said: str, place: str) -> OperatorError | None:
    """The error of a store that lets the sink do nothing; None if it said something else."""
    refused = next((word for word in _REFUSALS if word in said), None)
    if refused is None:
        return None
    return OperatorError(
        f"the store of the table at {place} refuses the sink: {refused}",
        fix="correct url and storage_options of the destination, and let that account read, "
        "write, list and delete below the url",
        detail=said.partition(_TRACE)[0],
    )


def unavailable(error: Exception, place: str) -> TransientError:
    """The error of a store that may do it later."""
    return TransientError(
        f"the table at {place} cannot be written now ({type(error).__name__})",
        fix="it is retried; check that its store can be reached",
        detail=str(error).partition(_TRACE)[0],
    )
