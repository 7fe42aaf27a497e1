"""How many requests a client may send: a token bucket each, within bounded memory.

Invariant: no more than ``clients_max`` buckets are kept; the one that was used longest ago goes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class RateLimit:
    """``per_s`` requests a second on average, and ``burst`` of them at once."""

    def __init__(
        self,
        per_s: float,
        burst: float,
        clients_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clients_max = clients_max
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, client: str) -> float:
        """How long the client has to wait before it may send a request."""
        return max(0.0, (1.0 - self._left(client)) / self._per_s)

    def count(self, client: str) -> None:
        """Count one request of the client."""
        self._buckets[client] = (self._left(client) - 1.0, self._clock())
        self._buckets.move_to_end(client)
        while len(self._buckets) > self._clients_max:
            self._buckets.popitem(last=False)

    def _left(self, client: str) -> float:
        left, at = self._buckets.get(client, (self._burst, 0.0))
        return min(self._burst, left + (self._clock() - at) * self._per_s)
