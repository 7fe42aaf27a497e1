"""An HTTP endpoint that is handed messages as JSON.

A request carries ``{"data": [message, ...]}``, or one bare message, and an ``Idempotency-Key`` made
of the consumer and the cursors it holds, so that a receiver can drop a repeated one. Invariant: a
message counts as delivered only when its whole request was answered with 2xx; the message that an
error speaks of is the first one that is not settled; no error text holds a secret.

Where messages have routes, a request goes to one path below the URL: neighbours of one route go
together, and the order of all messages stays.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import httpx
import numpy as np
import pyarrow.compute as pc
import xxhash

from cdc.backoff import pause_s
from cdc.bisection import halves
from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.decoding.columns import offsets_of
from cdc.decoding.joins import joined
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.queue.ledger.base import Integers
from cdc.queue.retry import TOO_LARGE, kind_of
from sinks.base import Delivery, Follower, Unfollowed
from sinks.columns import by_route, pieces, text_bytes
from sinks.http_answers import meaning, wait_asked_for
from sinks.http_client import Body, ConnectError, Send, certificate_refused, open_client
from sinks.http_wire import BadAnswerError

_REQUEST_BYTES_MAX = 8 << 20
_LEARNED_S = 600.0  # how long an endpoint's refusal of a large request is remembered
_NAMED_BYTES = 24  # of each message in the digest of a request: its cursor, and whether it is a gap
_GONE = "gone"  # the kind of the error when no server answers
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 10.0

_Result = TypeVar("_Result")


class WebhookSink:
    """Sends requests over kept connections: one for each part of a delivery, if there are several.

    An event loop of its own runs while something is delivered, in the thread that delivers.
    """

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        batch_size: int,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        batch: bool = True,
        timeout_s: float = 30.0,
        max_retries: int = 3,
        verify: bool = True,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url = httpx.URL(url)
        self._consumer = quote(consumer, safe="")
        self.messages_per_request = batch_size if batch else 1
        self._batch = batch
        self._max_retries = max_retries
        self._wait = wait
        self._learned = (_REQUEST_BYTES_MAX, 0.0)  # a smaller bound, and until when (monotonic)
        self._secrets = _secrets(self._url, headers or {})
        self._place = self._url.netloc.decode()
        self._client = open_client(
            self._url, method=method, headers=headers or {}, timeout_s=timeout_s, verify=verify
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = threading.Lock()  # held while the loop runs, and while it is closed
        self._closed = False

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Send the messages in order, up to the first request that is not answered with 2xx."""
        return self.deliver_parts([batch])[0]

    def deliver_parts(
        self, parts: Sequence[MessageBatch], follower: Follower | None = None
    ) -> list[Delivery]:
        """The same of several batches side by side, each over a connection of its own."""
        return self._run(self._deliver_parts(parts, follower or Unfollowed()))

    def probe(self) -> str:
        """Connect, with TLS if the URL says so, and send nothing: a request would be a message."""
        try:
            reached = self._run(self._client.connect())
        except (ConnectError, OSError) as error:
            raise self._connection_error(error) from error
        if not reached:
            return f"not tried: {self._place} is reached through a proxy"
        over = " and its certificate is trusted" if self._url.scheme == "https" else ""
        return f"{self._place} answers{over}; nothing was sent, so path and headers are not checked"

    def close(self) -> None:
        """Close the connections; a delivery that is under way sends no other request."""
        self._closed = True
        self._client.stop()
        self._end_loop()

    def _run(self, work: Coroutine[None, None, _Result]) -> _Result:
        try:
            with self._running:
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                return self._loop.run_until_complete(work)
        finally:
            if self._closed:
                self._end_loop()

    def _end_loop(self) -> None:
        """A loop that runs is ended by the thread that runs it."""
        if not self._running.acquire(blocking=False):
            return
        try:
            if self._loop is not None:
                self._loop.run_until_complete(self._client.close())
                self._loop.close()
                self._loop = None
        finally:
            self._running.release()

    async def _deliver_parts(
        self, parts: Sequence[MessageBatch], follower: Follower
    ) -> list[Delivery]:
        await self._client.refresh()
        delivery = _UnderWay(follower)
        try:
            if len(parts) == 1:
                return [await self._deliver_part(parts[0], delivery)]
            # All of them come to their end, whatever is raised in one.
            ended = await asyncio.gather(
                *(self._deliver_part(part, delivery) for part in parts), return_exceptions=True
            )
        finally:
            follower.finish()
        done = []
        for one in ended:
            if isinstance(one, BaseException):
                raise one
            done.append(one)
        return done

    async def _deliver_part(self, batch: MessageBatch, delivery: _UnderWay) -> Delivery:
        settled = 0
        try:
            for route, run in by_route(batch):
                send = self._client.sender(self._url if route is None else below(self._url, route))
                for piece, _ in pieces(
                    run,
                    batch.shape.message_parts,
                    messages_max=len(run),
                    bytes_max=_REQUEST_BYTES_MAX,
                ):
                    count, error = await self._send_all(send, _Written(piece), delivery)
                    settled += count
                    if error is not None:
                        if kind_of(error) is None:
                            delivery.error = error
                        return Delivery(settled, error=error)
        except BaseException as error:
            delivery.error = TransientError(f"delivery broke: {type(error).__name__}")
            raise
        return Delivery(settled)

    async def _send_all(
        self, send: Send, written: _Written, delivery: _UnderWay
    ) -> tuple[int, WalbrookError | None]:
        """Request after request; returns how many messages are safe, and why not all are.

        A request that may be one message's fault is cut by bisection until that is found alone.
        """
        at = 0
        waiting: list[tuple[int, int]] = []  # halves of a refused request; the next one is last
        while at < len(written):
            if (error := delivery.stop) is not None:
                return at, error
            # What is cut was tried often enough as a whole.
            retries = 0 if waiting else self._max_retries
            end = (
                waiting.pop()[1]
                if waiting
                else written.fitting(at, self.messages_per_request, self._bytes_max())
            )
            first, second = halves(at, end)
            if end - at > 1 and written.size(at, end) > self._bytes_max():
                waiting += [second, first]
                continue
            error = await self._send(send, written, at, end, retries)
            if error is None:
                delivery.follower.accepted(*written.cursors(at, end))
                at = end
            elif kind_of(error) is not None and end - at > 1:
                if error.kind == TOO_LARGE:
                    self._learn(written.size(at, end) // 2)
                waiting += [second, first]
            else:
                return at, error
        return at, None

    def _bytes_max(self) -> int:
        """The largest request of several messages that the endpoint is thought to take."""
        return self._learned[0] if time.monotonic() < self._learned[1] else _REQUEST_BYTES_MAX

    def _learn(self, bytes_max: int) -> None:
        """The endpoint refused a request for its size: send smaller ones for a while."""
        self._learned = (max(1, min(bytes_max, self._bytes_max())), time.monotonic() + _LEARNED_S)

    async def _send(
        self, send: Send, written: _Written, start: int, end: int, retries: int
    ) -> WalbrookError | None:
        text = written.text(start, end)
        body: Body = (b'{"data":[', text, b"]}") if self._batch else (text,)
        key = f"{self._consumer}:{written.name(start, end)}"
        for attempt in range(retries + 1):
            answer = None
            try:
                answer = await send(key, body)
                error = meaning(answer, self._place, self._secrets)
            except (ConnectError, BadAnswerError, OSError) as broken:
                error = self._connection_error(broken)
            if not isinstance(error, TransientError) or attempt == retries:
                return error
            if error.kind == _GONE:
                # The endpoint is away: the consumer is retried later and holds no slot meanwhile.
                return error
            backoff_s = pause_s(attempt + 1, _BACKOFF_FIRST_S, _BACKOFF_MAX_S)
            asked_s = wait_asked_for(answer, now=time.time()) if answer else 0.0
            await self._wait(max(backoff_s, asked_s))
        raise AssertionError("retries are not negative")

    def _connection_error(self, error: Exception) -> WalbrookError:
        if certificate_refused(error):
            return OperatorError(
                f"the certificate of {self._place} is not trusted",
                fix="install one that is, or set verify to false for a server you trust",
            )
        said = error if isinstance(error, ConnectError | BadAnswerError) else type(error).__name__
        return TransientError(
            f"the request to {self._place} failed: {said}",
            fix="it is retried; check that the endpoint is up and reachable",
            kind=_GONE if isinstance(error, ConnectError | TimeoutError) else "",
        )


@dataclass
class _UnderWay:
    """What the parts of one delivery share."""

    follower: Follower
    error: WalbrookError | None = None  # one that speaks of the endpoint

    @property
    def stop(self) -> WalbrookError | None:
        """Why no part may send another request."""
        return self.error or self.follower.error


class _Written:
    """Messages as JSON, written once for all of them: requests are ranges of their text."""

    def __init__(self, batch: MessageBatch) -> None:
        joined_text = joined(batch.messages(), ",")
        self._text = memoryview(text_bytes(joined_text))
        ends = offsets_of(joined_text).astype(np.int64)
        self._ends: list[int] = (ends - ends[0]).tolist()
        self._lsn, self._idx = (
            batch.rows.column(name).to_numpy() for name in ("commit_lsn", "commit_idx")
        )
        gaps = pc.equal(batch.rows.column("action"), "gap").to_numpy(zero_copy_only=False)
        self._named = memoryview(np.column_stack((self._lsn, self._idx, gaps)).tobytes())
        # Numbers, not cursors: so many objects would keep Python's garbage collector busy.
        self._places: tuple[list[int], list[int]] = (self._lsn.tolist(), self._idx.tolist())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def fitting(self, start: int, messages_max: int, bytes_max: int) -> int:
        """Where a request ends that begins at ``start``: within both bounds, or one message."""
        fits = bisect_right(self._ends, self._ends[start] + bytes_max) - 1
        return min(max(fits, start + 1), start + messages_max, len(self))

    def size(self, start: int, end: int) -> int:
        return self._ends[end] - self._ends[start]

    def text(self, start: int, end: int) -> memoryview:
        """The messages with commas between them."""
        return self._text[self._ends[start] : self._ends[end] - 1]

    def cursors(self, start: int, end: int) -> tuple[Integers, Integers]:
        return self._lsn[start:end], self._idx[start:end]

    def name(self, start: int, end: int) -> str:
        """The first and the last cursor, and a digest: some between them may be left out."""
        first = self._place(start)
        last = first if end - start == 1 else self._place(end - 1)
        named = self._named[start * _NAMED_BYTES : end * _NAMED_BYTES]
        return f"{first}-{last}:{xxhash.xxh3_64_hexdigest(named)}"

    def _place(self, at: int) -> str:
        lsn, idx = self._places
        return str(Cursor(lsn[at], idx[at]))


def below(url: httpx.URL, route: str) -> httpx.URL:
    """The path ``route`` below a URL, on the same server and with the same query."""
    path, question, query = url.raw_path.partition(b"?")
    return url.copy_with(raw_path=path.rstrip(b"/") + route.encode() + question + query)


def _secrets(url: httpx.URL, headers: Mapping[str, str]) -> tuple[str, ...]:
    """What a receiver could repeat in its answer and that no error may show."""
    parts = [url.password, *url.params.values()]
    for value in headers.values():
        parts += [value, *value.split()]
    return tuple(sorted({part for part in parts if part}, key=len, reverse=True))
