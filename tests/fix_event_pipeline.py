"""Consumers in event-time order for tests: a state database, whole stages, and dying on purpose.

``fate`` lets an ordering die at a named step, as SIGKILL would: nothing is cleaned up, and what
comes next is made from what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from cdc.connection import Connection
from cdc.state import positions
from spark_pipeline.delivery.sender import Sender
from spark_pipeline.eventtime import ordering, sending
from tests.event_pipeline import EventPipeline
from tests.fix_postgres import Database, PostgresServer, PostgresServers, fresh_database

STEPS: Final = ("planned", "sending", "released", "settled", "over")
"""``settled`` is within the transaction, once for each database; ``over`` is after it."""

PIECE: Final = 2
"""How many messages are sent between two chances to die."""


class Died(BaseException):
    """Not an Exception: nobody may catch it."""


class Fate:
    """When to die next."""

    def __init__(self) -> None:
        self._step, self._left = "", 0

    def let_die(self, step: str, count: int = 1) -> None:
        """At this step, when it is reached for the ``count``-th time."""
        self._step, self._left = step, count

    def reach(self, step: str) -> None:
        if step == self._step:
            self._left -= 1
            if self._left <= 0:
                self._step = ""
                raise Died(step)

    def turns(self, pipeline: EventPipeline, *, again: bool = False) -> bool:
        """Let a pipeline go on until it has nothing to do or dies; says whether it died.

        With ``again`` only until what was under way is settled.
        """
        died = True
        with suppress(Died):
            if not again:
                pipeline.turns()
            while again and pipeline.ordering._redo is not None:
                pipeline.ordering.turn()
            if again:
                pipeline.ordering.settle_delivered()
            died = False
        self._step = ""
        return died


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    made = Fate()
    take, settled = Sender.take, ordering.Ordering._settled

    def take_or_die(sender: Sender, rows: pa.RecordBatch) -> bool:
        goes_on = take(sender, rows)
        made.reach("sending")
        return goes_on

    def settled_or_dead(self: ordering.Ordering, *given: Any) -> None:
        made.reach("over")
        settled(self, *given)

    monkeypatch.setattr(sending, "_ROWS", PIECE)
    monkeypatch.setattr(Sender, "take", take_or_die)
    monkeypatch.setattr(ordering.Ordering, "_settled", settled_or_dead)
    monkeypatch.setattr(ordering, "reached", made.reach)
    monkeypatch.setattr(positions, "reached", made.reach)
    return made


@pytest.fixture(scope="module")
def event_database(
    postgres_servers: PostgresServers, postgres_server: PostgresServer
) -> Iterator[Database]:
    dsn = postgres_server.dsn
    with fresh_database(dsn, copied=postgres_servers.migrated(dsn)) as made:
        yield made


@pytest.fixture
def event_state(event_database: Database) -> Iterator[Connection]:
    """Of an empty state database."""
    with event_database.connect() as connection:
        forget_all(connection)
        yield connection


def forget_all(state: Connection) -> None:
    state.execute("DELETE FROM walbrook.sources")


MakePipeline = Callable[..., EventPipeline]


@pytest.fixture
def event_pipeline(
    event_state: Connection, event_database: Database, tmp_path: Path
) -> Iterator[MakePipeline]:
    """Makes pipelines, one after the other: each begins with nothing."""
    pipelines: list[EventPipeline] = []

    def make(**given: Any) -> EventPipeline:
        if pipelines:
            pipelines[-1].close()
        forget_all(event_state)
        directory = tmp_path / str(len(pipelines))
        directory.mkdir()
        pipelines.append(
            EventPipeline(event_state, directory, state_dsn=event_database.dsn, **given)
        )
        return pipelines[-1]

    yield make
    if pipelines:
        pipelines[-1].close()
