"""How long a refused message waits before it is delivered again. Pure."""

from __future__ import annotations

from typing import Final, Literal

from cdc import backoff
from cdc.config.sink_parts import Retry
from cdc.errors import PoisonError, TransientError, WalbrookError

ErrorKind = Literal["poison", "transient"]

ANSWERED: Final = "answered"
"""The kind of a transient error that the destination reported of one message, not of itself."""

TOO_LARGE: Final = "too_large"
"""The kind of a poison error that no delivery of the same message can pass."""

_POISON_FACTOR: Final = 10  # what was refused for its content is seldom taken a second later


def kind_of(error: WalbrookError) -> ErrorKind | None:
    """What a refusal says of the message; None if it speaks of the destination as a whole."""
    if isinstance(error, PoisonError):
        return "poison"
    if isinstance(error, TransientError) and error.kind == ANSWERED:
        return "transient"
    return None


def pause_s(retry: Retry, deliveries: int, kind: ErrorKind) -> float:
    """After so many deliveries: it doubles each time up to a bound, and is spread by half."""
    first_ms = retry.first_ms * (_POISON_FACTOR if kind == "poison" else 1)
    return backoff.pause_s(deliveries, first_ms / 1000, retry.max_ms / 1000)
