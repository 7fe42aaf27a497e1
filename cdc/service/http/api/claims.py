"""Claimers that wait: of each consumer one line, served by one claim pass after another.

However many wait, one statement serves them, each with its share (``walbrook.receive_shared``). A
pass is made when a claimer joins the line, when messages were stored or given back (NOTIFY), and
when a lease ends or a delay is over. Invariants: every claimer gets its messages, or none when its
time is up; a claimer that hung up is handed nothing, and what was claimed for it is given back at
once; a line has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import structlog

from cdc.connection import connect_async
from cdc.service.http.api.refusals import RefusedError
from cdc.service.http.api.state import StateConnections

_logger = structlog.get_logger("walbrook.api")

CHANNEL = "walbrook_pull"
_LOOK_S = 1.0  # also without a word from the database
_SHORTEST_S = 0.005
_RECONNECT_S = 1.0
_PASS_MAX = 200  # claimers served by one statement

_CONSUMER = """
SELECT p.consumer, p.max_waiting FROM walbrook.pull_consumer(%s, to_receive => true) p
"""
_RECEIVE = """
SELECT claimer, ack_id, deliveries,
       to_char(lease_until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       commit_lsn || ':' || commit_idx,
       table_schema, table_name, action, message::text
  FROM walbrook.receive_shared(%s, %s::int[], %s::interval[], %s::text[])
"""
_NEXT = """
SELECT extract(epoch FROM walbrook.next_due(%s) - clock_timestamp())::float8
"""
_GIVE_BACK = "SELECT walbrook.give_back(%s, %s)"


@dataclass(frozen=True)
class Claimed:
    """A message that was handed out; ``text`` is its JSON as it was stored."""

    ack_id: str
    deliveries: int
    lease_until: str
    cursor: str
    table_schema: str
    table_name: str
    action: str
    text: str


@dataclass(eq=False)
class Claimer:
    """A request for up to ``batch_size`` messages before ``until`` (the loop's clock)."""

    batch_size: int
    until: float
    visibility_s: float | None
    holder: str | None
    answer: asyncio.Future[list[Claimed]] = field(default_factory=asyncio.Future)


class Claims:
    """The lines of all consumers, and the ear for what the database says of them."""

    def __init__(self, dsn: str, connections: StateConnections) -> None:
        self._dsn = dsn
        self._connections = connections
        self._claim_queues: dict[str, _ClaimQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def receive(
        self,
        consumer: str,
        *,
        batch_size: int,
        wait_s: float,
        visibility_s: float | None = None,
        holder: str | None = None,
    ) -> list[Claimed]:
        """Messages of a consumer, at once or within ``wait_s``; none if there are none."""
        ((number, most),) = await self._connections.fetch(_CONSUMER, (consumer,))
        line = self._line(consumer, int(str(number)))
        if len(line.claimers) >= int(str(most)):
            raise RefusedError(
                429,
                f"{most} requests wait for messages of {consumer} already",
                fix="try again later, or raise max_waiting of its destination",
                headers={"Retry-After": "1"},
            )
        until = asyncio.get_running_loop().time() + (0 if self._closed else wait_s)
        claimer = Claimer(batch_size, until, visibility_s, holder)
        line.join(claimer)
        try:
            return await claimer.answer
        except asyncio.CancelledError:
            if claimer.answer.done() and not claimer.answer.cancelled():
                self._keep(line.give_back(claimer.answer.result()))
            raise

    async def give_back(self, consumer: str, messages: Sequence[Claimed]) -> None:
        """What was claimed for a request that is gone."""
        if messages:
            ack_ids = [message.ack_id for message in messages]
            await self._connections.fetch(_GIVE_BACK, (consumer, ack_ids))

    def stop_waiting(self) -> None:
        """Every request is answered with what there is, and none waits any more."""
        self._closed = True
        for line in self._claim_queues.values():
            line.stop_waiting()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    def _line(self, consumer: str, number: int) -> _ClaimQueue:
        if not self._claim_queues:
            self._keep(self._listen())
        line = self._claim_queues.get(consumer)
        if line is None or line.number != number:
            line = self._claim_queues[consumer] = _ClaimQueue(consumer, number, self._connections)
            self._keep(line.serve())
        return line

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        """Wake the line of each consumer that the database speaks of; without it they look."""
        while True:
            try:
                async with await connect_async(self._dsn, name="api:listen") as connection:
                    await connection.execute(f"LISTEN {CHANNEL}".encode())
                    for line in self._claim_queues.values():
                        line.wake.set()
                    async for note in connection.notifies():
                        for line in self._claim_queues.values():
                            if str(line.number) == note.payload:
                                line.wake.set()
            except psycopg.Error as error:
                _logger.warning("api.not_listening", error=str(error).strip())
            await asyncio.sleep(_RECONNECT_S)


class _ClaimQueue:
    """The claimers of one consumer, first come first."""

    def __init__(self, consumer: str, number: int, connections: StateConnections) -> None:
        self.number = number
        self.claimers: list[Claimer] = []
        self.wake = asyncio.Event()
        self._consumer = consumer
        self._connections = connections

    def join(self, claimer: Claimer) -> None:
        self.claimers.append(claimer)
        self.wake.set()

    def stop_waiting(self) -> None:
        for claimer in self.claimers:
            claimer.until = 0
        self.wake.set()

    async def give_back(self, messages: Sequence[Claimed]) -> None:
        ack_ids = [message.ack_id for message in messages]
        if ack_ids:
            await self._connections.fetch(_GIVE_BACK, (self._consumer, ack_ids))

    async def serve(self) -> None:
        """One pass after another, for as long as the service runs."""
        while True:
            await self._pause()
            self.wake.clear()
            claimers = [each for each in self.claimers if not each.answer.done()][:_PASS_MAX]
            try:
                if claimers and await self._pass(claimers):
                    self.wake.set()  # there may be more where that came from
            except Exception as error:  # a line that ends would never serve its claimers
                if not isinstance(error, psycopg.Error | RefusedError):
                    _logger.exception("api.claims", consumer=self._consumer)
                for claimer in claimers:
                    if not claimer.answer.done():
                        claimer.answer.set_exception(error)
            self._dismiss()

    async def _pass(self, claimers: list[Claimer]) -> bool:
        """Serve these. Returns True if any got messages."""
        rows = await self._connections.fetch(
            _RECEIVE,
            (
                self._consumer,
                [claimer.batch_size for claimer in claimers],
                [_interval(claimer.visibility_s) for claimer in claimers],
                [claimer.holder for claimer in claimers],
            ),
        )
        gone: list[Claimed] = []
        for at, mine in itertools.groupby(rows, key=lambda row: int(str(row[0])) - 1):
            messages = [Claimed(*row[1:]) for row in mine]  # type: ignore[arg-type]
            if claimers[at].answer.done():
                gone += messages
            else:
                claimers[at].answer.set_result(messages)
        await self.give_back(gone)
        return bool(rows)

    def _dismiss(self) -> None:
        """A claimer with messages leaves, and one whose time is up leaves with none."""
        now = asyncio.get_running_loop().time()
        for claimer in self.claimers:
            if not claimer.answer.done() and claimer.until <= now:
                claimer.answer.set_result([])
        self.claimers = [each for each in self.claimers if not each.answer.done()]

    async def _pause(self) -> None:
        """Until there is something to do, or a request's time is up."""
        if self.wake.is_set():
            return
        if not self.claimers:
            await self.wake.wait()
            return
        now = asyncio.get_running_loop().time()
        wait_s = min([claimer.until - now for claimer in self.claimers] + [_LOOK_S])
        try:
            ((due_s,),) = await self._connections.fetch(_NEXT, (self.number,))
        except (psycopg.Error, RefusedError):
            due_s = None
        if isinstance(due_s, float):
            wait_s = min(wait_s, due_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wake.wait(), max(wait_s, _SHORTEST_S))


def _interval(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds} seconds"
