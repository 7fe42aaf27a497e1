"""Finding the message that Kafka refuses: it refuses whole batches, and names none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cdc.bisection import halves
from cdc.change import MessageBatch
from cdc.errors import PoisonError
from sinks.base import Delivery


def send_in_halves(batch: MessageBatch, send: Callable[[MessageBatch], Delivery]) -> Delivery:
    """Send a batch; one with a refused message is sent in halves, until that one stands alone.

    Invariant: a refusal is returned only for a message that was sent alone.
    """
    done = send(batch)
    rest = batch.slice(done.settled)
    if not isinstance(done.error, PoisonError) or len(rest) < 2:
        return done
    settled = done.settled
    for start, stop in halves(0, len(rest)):
        done = send_in_halves(rest.slice(start, stop - start), send)
        settled += done.settled
        if done.error is not None:
            break
    return replace(done, settled=settled)
