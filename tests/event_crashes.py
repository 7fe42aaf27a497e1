"""Runs of a consumer in event-time order with and without crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.event_pipeline import ITEM, NAME, EventPipeline
from tests.fix_event_pipeline import Fate
from tests.log_pipeline import arrived


def in_files(pipeline: EventPipeline) -> list[Any]:
    return [shown(m) for m in arrived(pipeline.directory / NAME)]


def shown(message: dict[str, Any]) -> tuple[Any, ...]:
    """What of a message must be the same in every run."""
    metadata = message["metadata"]
    return (
        metadata["database_name"], message["action"], message["record"].get("id"),
        metadata.get("event_time"), metadata.get("late"), metadata["sequence"],
    )  # fmt: skip


Phase = list[tuple[str, list[bytes]]]

Write = Callable[[EventPipeline, Phase], None]


def write(pipeline: EventPipeline, transactions: Phase) -> None:
    for source, changes in transactions:
        pipeline.write_messages(source, ITEM, *changes)


def without_crashes(pipeline: EventPipeline, phases: list[Phase], write: Write = write) -> None:
    for phase in phases:
        write(pipeline, phase)
        pipeline.turns()
        pipeline.ordering.settle()


def with_crashes(
    pipeline: EventPipeline,
    phases: list[Phase],
    fate: Fate,
    next_death: Callable[[], tuple[str, int]],
    write: Write = write,
) -> int:
    """The same, and after a death the next phase comes before the start; gives how many died."""
    deaths, is_dead = 0, False
    for phase in [*phases, []]:
        write(pipeline, phase)
        while is_dead:
            # What was under way is made again, alone, and may be what it dies of once more.
            pipeline.start()
            fate.let_die(*next_death())
            is_dead = pipeline.ordering._redo is not None and fate.turns(pipeline, again=True)
            deaths += is_dead
        fate.let_die(*next_death())
        is_dead = fate.turns(pipeline)
        deaths += is_dead
        if not is_dead:
            pipeline.ordering.settle()
    if is_dead:
        pipeline.start()
        pipeline.turns()
        pipeline.ordering.settle()
    return deaths
