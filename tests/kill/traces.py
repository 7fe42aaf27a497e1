"""The trace of random changes, held against what their endpoints saw.

Truth is what an endpoint noted before it answered. A trace may know less than the endpoint, where a
process was killed before it could note something, and must never say more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cdc.config import Config, load
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.trace.change import TracedChange, read_any_cursor
from cdc.trace.conclusion import Conclusion
from cdc.trace.story import ChangeTrace, ConsumerTrace
from cdc.trace.tracer import Tracer
from tests.fix_http import Endpoint

_REFUSALS = (400, 422, 500)


@dataclass(frozen=True)
class Seen:
    """What an endpoint saw of each message, by idempotency key."""

    accepted: Counter[str]
    refused: Counter[str]

    @classmethod
    def by(cls, endpoint: Endpoint) -> Seen:
        accepted: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        for request in endpoint.requests:
            keys = [str(message["metadata"]["idempotency_key"]) for message in request.messages]  # type: ignore[index]
            if 200 <= request.status < 300:
                accepted.update(keys)
            elif request.status in _REFUSALS:
                refused.update(keys)
        return cls(accepted, refused)


def check_traces(
    config: Path, state: Connection, endpoints: Mapping[str, Endpoint], *, count: int, seed: int
) -> Counter[Conclusion]:
    """Trace ``count`` random changes that some endpoint was sent; returns the conclusions."""
    settings = load(config)
    seen = {name: Seen.by(endpoint) for name, endpoint in endpoints.items()}
    keys = sorted({key for each in seen.values() for key in (*each.accepted, *each.refused)})
    chosen = random.Random(seed).sample(keys, min(count, len(keys)))
    tracer, conclusions = Tracer(settings), Counter[Conclusion]()
    for key in chosen:
        trace = tracer.trace(state, "shop", read_any_cursor(key))
        _check_source(trace, read_any_cursor(key))
        for found in trace.consumers:
            if found.consumer in seen:
                _check_consumer(found, seen[found.consumer], key, trace)
                conclusions[found.conclusion] += 1
            else:
                _check_left_out(found, settings, trace)
    assert len(chosen) == count, f"only {len(chosen)} changes were sent"
    return conclusions


def _check_source(trace: ChangeTrace, cursor: Cursor) -> None:
    assert isinstance(trace.change, TracedChange), (cursor, trace.missing)
    assert trace.change.cursor == cursor
    assert trace.change.committed_us <= trace.change.logged_us


def _check_consumer(found: ConsumerTrace, seen: Seen, key: str, trace: ChangeTrace) -> None:
    said = [step.what for step in found.steps]
    case = (key, found, trace.notes, seen.accepted[key], seen.refused[key])
    if seen.accepted[key]:
        assert found.conclusion is Conclusion.DELIVERED, case
    else:
        assert found.conclusion in (Conclusion.DEAD, Conclusion.DISCARDED), case
    refusals = sum("refused, the" in what for what in said)
    assert refusals <= seen.refused[key], case
    # The stretch that it was in may have begun before it.
    times = [end for step in found.steps if (end := step.until or step.at) is not None]
    assert all(time.timestamp() * 1e6 >= trace.change.committed_us for time in times), case  # type: ignore[union-attr]


def _check_left_out(found: ConsumerTrace, settings: Config, trace: ChangeTrace) -> None:
    (sink,) = [sink for sink in settings.sinks if sink.name == found.consumer]
    assert trace.change is not None
    takes = sink.source.takes(trace.change.table_schema, trace.change.table_name)
    assert takes == (found.conclusion is not Conclusion.LEFT_OUT), found
