"""A consumer in event-time order whose webhook refuses messages."""

from __future__ import annotations

import threading
from typing import Any, cast

from tests.event_pipeline import NAME, EventPipeline
from tests.fix_http import Endpoint
from tests.log_pipeline import arrived
from tests.waiting import until


def hook(endpoint: Endpoint, **given: Any) -> dict[str, Any]:
    place = {"type": "webhook", "url": endpoint.url, "max_retries": 0}
    return {"destination": place, "retry": {"first_ms": 1, "max_ms": 10}, **given}


def taken(endpoint: Endpoint) -> list[Any]:
    messages = cast("list[dict[str, Any]]", endpoint.written)
    return [m["record"].get("id", m["action"]) for m in messages]


def ids(pipeline: EventPipeline) -> list[Any]:
    return [m["record"].get("id", m["action"]) for m in arrived(pipeline.directory / NAME)]


def redeliver(pipeline: EventPipeline) -> None:
    """Deliver what waits, until nothing does."""

    def empty() -> bool:
        for queue in pipeline.queues.values():
            queue.look(pipeline.state)
            queue.deliver_due(pipeline.state, threading.Event())
        return not pipeline.rows("SELECT 1 FROM walbrook.events")

    until("an empty queue", empty, 30)
