"""A pipeline with a webhook that refuses messages, and its retry queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import pgoutput
from tests.fix_http import Endpoint
from tests.log_pipeline import LogPipeline
from tests.waiting import until
from tests.wire_messages import transaction

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25), ("owner", 25)])

Refuses = Callable[[dict[str, Any]], bool]


def insert(number: int, *rows: tuple[int, str] | tuple[int, str, str]) -> list[bytes]:
    """A transaction of inserts: id, name and, if it matters, owner."""
    whole = [(str(id), name, *(rest or ["o"])) for id, name, *rest in rows]
    return [ITEM, *transaction(0x100 * number, *(pgoutput.insert(1, list(r)) for r in whole))]


def refusing(endpoint: Endpoint, refused: Refuses) -> None:
    endpoint.refuses = lambda messages: any(refused(m["record"]) for m in messages)  # type: ignore[arg-type]


def names(endpoint: Endpoint) -> list[str]:
    return [m["record"]["name"] for r in endpoint.accepted for m in r.messages]  # type: ignore[index]


def queue(pipeline: LogPipeline) -> list[tuple[Any, ...]]:
    return pipeline.rows(
        "SELECT (record::json ->> 'name'), deliveries, due_at IS NOT NULL FROM walbrook.events "
        "ORDER BY commit_lsn, commit_idx"
    )


def serve_once(pipeline: LogPipeline) -> None:
    """One claim of what is due."""
    pipeline.deliver_due(claims=1)


def redeliver(pipeline: LogPipeline) -> None:
    """Deliver what is due, until nothing waits any more."""

    def empty() -> bool:
        serve_once(pipeline)
        return not pipeline.rows("SELECT 1 FROM walbrook.events")

    until("an empty queue", empty, 60)
