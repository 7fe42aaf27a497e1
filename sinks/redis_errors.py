"""What a Redis server's refusal means: whether it passes by itself or needs a person.

Invariant: ``what`` names the code alone. The server's text is the detail: it may repeat what it was
sent, but no password.
"""

from __future__ import annotations

import redis

from cdc.errors import OperatorError, TransientError, WalbrookError

_TEXT_MAX = 200

_PASSES = frozenset(
    {"OOM", "LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN"}
    | {"BUSY", "MISCONF", "NOREPLICAS", "TRYAGAIN"}
)
_FIXES = {
    "WRONGTYPE": "choose another stream_key, or delete the key: it holds something else",
    "NOAUTH": "set the username and password of the destination",
    "WRONGPASS": "correct the username and password of the destination",
    "NOPERM": "let the user run MULTI, EXEC, XADD and XREVRANGE on the stream's key",
    "MOVED": "point the destination at the cluster node that owns the stream's key",
}
_KINDS: tuple[tuple[type[Exception], str], ...] = (
    # redis-py takes the code off the texts of errors it has a class for.
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.AuthenticationError, "WRONGPASS"),
    (redis.exceptions.AuthenticationWrongNumberOfArgsError, "WRONGPASS"),
    (redis.exceptions.BusyLoadingError, "LOADING"),
    (redis.exceptions.ReadOnlyError, "READONLY"),
    (redis.exceptions.OutOfMemoryError, "OOM"),
    (redis.exceptions.MovedError, "MOVED"),
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
    (redis.exceptions.TryAgainError, "TRYAGAIN"),
)


def from_reply(text: str) -> WalbrookError:
    """The meaning of an error that the server answered with."""
    text = text.lstrip("-")
    return _meaning(text.split(" ", 1)[0], text)


def from_exception(error: Exception) -> WalbrookError:
    """The meaning of an error that the client raised."""
    for kind, code in _KINDS:
        if isinstance(error, kind):
            return _meaning(code, str(error))
    if isinstance(error, redis.ResponseError):
        return from_reply(str(error))
    said = str(error)[:_TEXT_MAX]
    of_the_network = isinstance(error, OSError | redis.ConnectionError | redis.TimeoutError)
    return TransientError(
        f"the connection to Redis failed: {said if of_the_network else type(error).__name__}",
        fix="it is retried; check that the server is up and reachable",
        detail="" if of_the_network else said,
    )


def _meaning(code: str, text: str) -> WalbrookError:
    what, detail = f"Redis refused a message ({_code(code)})", text[:_TEXT_MAX]
    if code in _PASSES:
        return TransientError(
            what, fix="it is retried until the server accepts writes again", detail=detail
        )
    fix = _FIXES.get(code, "check the server and the destination")
    return OperatorError(what, fix=fix, detail=detail)


def _code(word: str) -> str:
    """The first word of an answer, if it is an error code."""
    return word if word.isascii() and word.isalpha() and word.isupper() else "unknown"
