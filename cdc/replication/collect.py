"""Messages on their way into one batch, bounded by rows, bytes and age."""

from __future__ import annotations

from cdc.replication.protocol import Keepalive
from cdc.replication.publish import BatchLimits
from cdc.replication.stream import ReplicationStream


class Collector:
    """Takes messages off the stream until a batch is due."""

    def __init__(self, limits: BatchLimits, linger_s: float) -> None:
        self._limits = limits
        self._linger_s = linger_s
        self._messages: list[bytes] = []
        self._bytes = 0
        self._since = 0.0

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
            or now - self._since >= self._linger_s
        )

    def patience_s(self, now: float, wake: float) -> float:
        """How long the socket may be waited for before ``wake`` or the end of the linger."""
        if self._messages:
            wake = min(wake, self._since + self._linger_s)
        return max(0.0, wake - now)

    def hand_over(self) -> list[bytes]:
        """The collected messages; the collector begins anew and keeps nothing of them."""
        messages, self._messages, self._bytes = self._messages, [], 0
        return messages
