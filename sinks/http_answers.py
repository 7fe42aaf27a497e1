"""What an HTTP answer means for delivery: pure functions of status, headers and body.

Answers that speak of the endpoint stop the consumer and lose nothing; those that speak of the
message's content make it poison. A 500 may be either: one message on which the endpoint breaks, or
an endpoint that is broken; the delivery finds out which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from cdc.errors import OperatorError, PoisonError, TransientError, WalbrookError
from cdc.queue.retry import ANSWERED, TOO_LARGE

RETRY_AFTER_MAX_S = 30.0

_EXCERPT_CHARS_MAX = 200
_PASSES = frozenset({408, 425, 429, 502, 503, 504})
_ABOUT_THE_ENDPOINT = {
    401: "set the header that the endpoint wants",
    403: "give the consumer's credentials the right to post there",
    404: "correct the webhook's url",
    405: "correct the webhook's method",
    407: "configure the proxy's credentials",
}


@dataclass(frozen=True)
class Answer:
    """The parts of an HTTP answer that count."""

    status: int
    retry_after: str = ""
    excerpt: bytes = b""


def meaning(answer: Answer, place: str, secrets: Iterable[str] = ()) -> WalbrookError | None:
    """The error that an answer stands for; none for a success."""
    status = answer.status
    if 200 <= status < 300:
        return None
    what = f"{place} answered {status}"
    if 300 <= status < 400:
        return OperatorError(
            f"{what}, a redirect, which is not followed", fix="configure the final url"
        )
    # Endpoints repeat what they were sent.
    detail = _quoted(answer.excerpt, secrets)
    if status in _PASSES:
        return TransientError(
            what, fix="it is retried; check the endpoint if it stays", detail=detail
        )
    if status >= 500:
        # The endpoint is there and failed on what it was sent, which may be one message's doing.
        return TransientError(
            what,
            fix="it is retried; check the endpoint if it stays",
            kind=ANSWERED,
            detail=detail,
        )
    if status == 413:
        return PoisonError(
            what,
            fix="let the endpoint take larger requests, and redeliver it",
            kind=TOO_LARGE,
            detail=detail,
        )
    if status in _ABOUT_THE_ENDPOINT:
        return OperatorError(what, fix=_ABOUT_THE_ENDPOINT[status], detail=detail)
    return PoisonError(
        what,
        fix="make the endpoint accept this message; it is retried by itself with growing pauses, "
        "and later ones of its group wait for it",
        detail=detail,
    )


def wait_asked_for(answer: Answer, *, now: float) -> float:
    """How many seconds ``Retry-After`` asks for, within a cap; 0 when it does not."""
    text = answer.retry_after.strip()
    if text.isdigit() and text.isascii():
        seconds = float(text)
    else:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S)


def _quoted(excerpt: bytes, secrets: Iterable[str]) -> str:
    text = excerpt.decode("utf-8", errors="replace")
    for secret in secrets:
        text = text.replace(secret, "***")
    text = "".join(char if char.isprintable() else " " for char in text).strip()
    return text[:_EXCERPT_CHARS_MAX]
