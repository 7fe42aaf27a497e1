"""The ledger as sorted sets in Redis, for those who do not want it in the state database.

A member is a note: its cursors, the highest first. In the set of a queue it is one message. All
scores are 0, so members are in the order of their bytes, which is that of their highest cursors; a
score is a floating-point number and could not hold one. Invariant: a server that fails or hangs
costs a delivery no more than two timeouts in ``pause_s``; what it loses is repeated at worst.

A key that was not written to for a month expires: a consumer that is gone leaves nothing.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.queue.ledger.base import Integers, pack_each, pack_note, packed

PAUSE_S: Final = 5.0
_KEPT_S: Final = 30 * 86_400
_TRIMMED_EVERY_S: Final = 1.0
_TEXT_MAX: Final = 200


class RedisLedger:
    """Sorted sets over a kept connection."""

    with_state = False

    def __init__(self, url: str, *, timeout_s: float, pause_s: float | None = None) -> None:
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A connection that the server has closed meanwhile is no failure.
            retry=Retry(NoBackoff(), 1),
        )
        self._pause_s = PAUSE_S if pause_s is None else pause_s
        self._lock = threading.Lock()
        self._failure: tuple[float, str] | None = None  # until when it is left alone, and why
        self._trimmed: dict[str, float] = {}

    def seen(self, ledger: str, first: Cursor, last: Cursor, *, queued: bool = False) -> bytes:
        asked = self._pipeline()
        asked.zrangebylex(_key(ledger, queued), b"[" + packed(first), b"+")
        (found,) = self._run(asked)
        return b"".join(found)

    def note(self, ledger: str, lsn: Integers, idx: Integers, *, queued: bool = False) -> None:
        commands, key = self._pipeline(), _key(ledger, queued)
        members = pack_each(lsn, idx) if queued else [pack_note(lsn, idx)[1]]
        commands.zadd(key, dict.fromkeys(members, 0))
        commands.expire(key, _KEPT_S)
        self._run(commands)

    def trim(self, ledger: str, below: Cursor) -> None:
        """Not more often than once a second: what stays a little longer is harmless."""
        now = time.monotonic()
        with self._lock:
            if now - self._trimmed.get(ledger, -_TRIMMED_EVERY_S) < _TRIMMED_EVERY_S:
                return
            self._trimmed[ledger] = now
            if len(self._trimmed) > 1000:  # names of consumers that were moved back
                self._trimmed = {ledger: now}
        commands = self._pipeline()
        commands.zremrangebylex(_key(ledger), b"-", b"(" + packed(below))
        self._run(commands)

    def drop(self, ledger: str, lsn: Integers, idx: Integers) -> None:
        commands = self._pipeline()
        commands.zrem(_key(ledger, queued=True), *pack_each(lsn, idx))
        self._run(commands)

    def close(self) -> None:
        self._client.close()

    def _pipeline(self) -> Pipeline:
        return self._client.pipeline(transaction=False)

    def _run(self, commands: Pipeline) -> list[list[bytes]]:
        with self._lock:
            failure = self._failure
        if failure is not None and time.monotonic() < failure[0]:
            raise _unreachable(failure[1])
        try:
            answers: list[list[bytes]] = commands.execute()
        except (redis.RedisError, OSError) as error:
            why = f"{type(error).__name__}: {error}"[:_TEXT_MAX]
            with self._lock:
                self._failure = (time.monotonic() + self._pause_s, why)
            raise _unreachable(why) from error
        if failure is not None:
            with self._lock:
                self._failure = None
        return answers


def _key(ledger: str, queued: bool = False) -> str:
    return f"walbrook:ledger:{ledger}" + (":queued" if queued else "")


def _unreachable(why: str) -> TransientError:
    return TransientError(
        f"the ledger in Redis cannot be used: {why}",
        fix="check the server at ledger.url; deliveries go on without it",
    )
