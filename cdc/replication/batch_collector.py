"""Messages on their way into one batch, bounded by rows, bytes and age.

The linger adapts to the load. A lone transaction is sealed as soon as its commit is here. In a
stream of small transactions batches follow each other at the pace of the linger, so that sealing
does not cost more than reading; the socket is not read meanwhile either, because each read of it
costs as much. A transaction that is not whole yet waits for the linger at most.
"""

from __future__ import annotations

import math

from cdc.replication.protocol import XLOG_HEADER_BYTES, Keepalive
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.replication.stream import ReplicationStream

_ENDS = frozenset(b"CcAPKrp")
"""The first bytes of the messages that end a transaction, or a piece of one."""

_FEW = 256
"""A batch of fewer messages may leave the socket alone: its buffer holds what comes in a linger."""


class BatchCollector:
    """Takes messages off the stream until a batch is due."""

    def __init__(self, limits: BatchLimits, linger_s: float) -> None:
        self._limits = limits
        self._linger_s = linger_s
        self._messages: list[bytes] = []
        self._bytes = 0
        self._since = 0.0
        self._handed_over_at = -math.inf

    @property
    def empty(self) -> bool:
        return not self._messages

    def fill(self, stream: ReplicationStream, now: float) -> tuple[int, Keepalive | None]:
        """Take what there is; zero bytes and no keepalive mean: wait for the socket."""
        if not self._messages:
            self._since = now
        taken, keepalive = stream.drain(
            self._messages,
            bytes_max=self._limits.bytes - self._bytes,
            rows_max=self._limits.rows,
        )
        self._bytes += taken
        return taken, keepalive

    def due(self, now: float) -> bool:
        return bool(self._messages) and (
            len(self._messages) >= self._limits.rows
            or self._bytes >= self._limits.bytes
            or now >= self._lingers_until()
        )

    @property
    def gathers(self) -> bool:
        """Whether it holds a few whole transactions, and only waits for more of them."""
        return 0 < len(self._messages) < _FEW and self._is_whole

    def patience_s(self, now: float, wake: float) -> float:
        """How long the socket may be waited for before ``wake`` or the end of the linger."""
        if self._messages:
            wake = min(wake, self._lingers_until())
        return max(0.0, wake - now)

    def hand_over(self, now: float) -> list[bytes]:
        """Returns the collected messages and forgets them."""
        messages, self._messages, self._bytes = self._messages, [], 0
        self._handed_over_at = now
        return messages

    def _lingers_until(self) -> float:
        return (self._handed_over_at if self._is_whole else self._since) + self._linger_s

    @property
    def _is_whole(self) -> bool:
        return self._messages[-1][XLOG_HEADER_BYTES] in _ENDS
