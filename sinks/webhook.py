"""An HTTP endpoint that is handed messages as JSON.

A request carries ``{"data": [message, ...]}``, or one bare message, and an ``Idempotency-Key`` made
of the consumer and the cursors it holds, so that a receiver can drop a repeated one. What must
always hold: a message counts as delivered only when its whole request was answered with 2xx; the
message that an error speaks of is the first one that is not settled; no error text holds a secret.

Where messages have routes, a request goes to one path below the URL: neighbours of one route go
together, and the order of all messages stays.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from urllib.parse import quote

import httpx
import numpy as np
import pyarrow.compute as pc
import xxhash

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.decoding.columns import offsets_of
from cdc.decoding.joins import joined
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.queue.ledger import Integers
from cdc.queue.retry import TOO_LARGE, kind_of
from sinks.base import Accepted, Delivery, nobody_asks
from sinks.columns import by_route, pieces, text_bytes
from sinks.http_answers import Answer, meaning, wait_asked_for
from sinks.http_client import Body, ConnectError, certificate_refused, open_client
from sinks.http_wire import BadAnswerError

_REQUEST_BYTES_MAX = 8 << 20
_LEARNED_S = 600.0  # how long an endpoint's refusal of a large request is remembered
_GONE = "gone"  # the kind of the error that says that nobody answers
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MAX_S = 10.0


class WebhookSink:
    """Sends requests one after another over a kept connection."""

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
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = httpx.URL(url)
        self._consumer = quote(consumer, safe="")
        self._messages_max = batch_size if batch else 1
        self._batch = batch
        self._max_retries = max_retries
        self._wait = wait
        self._learned = (_REQUEST_BYTES_MAX, 0.0)  # a smaller bound, and until when (monotonic)
        self._secrets = _secrets(self._url, headers or {})
        self._place = self._url.netloc.decode()
        self._client = open_client(
            self._url, method=method, headers=headers or {}, timeout_s=timeout_s, verify=verify
        )

    def deliver(self, batch: MessageBatch, accepted: Accepted = nobody_asks) -> Delivery:
        """Send the messages in order, up to the first request that is not answered with 2xx."""
        settled = 0
        for route, run in by_route(batch):
            url = self._url if route is None else below(self._url, route)
            for piece, _ in pieces(
                run,
                batch.shape.message_parts,
                messages_max=len(run),
                bytes_max=_REQUEST_BYTES_MAX,
            ):
                count, error = self._send_all(url, _Written(piece), accepted)
                settled += count
                if error is not None:
                    return Delivery(settled, error=error)
        return Delivery(settled)

    def probe(self) -> str:
        """Connect, with TLS if the URL says so, and send nothing: a request would be a message."""
        try:
            reached = self._client.connect()
        except (ConnectError, OSError) as error:
            raise self._connection_error(error) from error
        if not reached:
            return f"not tried: {self._place} is reached through a proxy"
        over = " and its certificate is trusted" if self._url.scheme == "https" else ""
        return f"{self._place} answers{over}; nothing was sent, so path and headers are not checked"

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _send_all(
        self, url: httpx.URL, written: _Written, accepted: Accepted
    ) -> tuple[int, WalbrookError | None]:
        """Request after request; returns how many messages are safe, and why not all are."""
        at, error = 0, None
        while at < len(written) and error is None:
            end = written.fitting(at, self._messages_max, self._bytes_max())
            at, error = self._send_isolating(url, written, at, end, accepted)
        return at, error

    def _send_isolating(
        self, url: httpx.URL, written: _Written, start: int, end: int, accepted: Accepted
    ) -> tuple[int, WalbrookError | None]:
        """Send; a request that may be one message's fault is halved until that is found alone.

        Returns up to where all is safe, and what is wrong with the message there.
        """
        waiting = [(start, end)]
        while waiting:
            first, last = waiting.pop()
            middle = (first + last) // 2
            if last - first > 1 and written.size(first, last) > self._bytes_max():
                waiting += [(middle, last), (first, middle)]
                continue
            # What is cut was tried often enough as a whole.
            retries = self._max_retries if (first, last) == (start, end) else 0
            error = self._send(url, written, first, last, retries)
            if error is None:
                error = accepted(*written.cursors(first, last))
                if error is not None:
                    return last, error
            elif kind_of(error) is not None and last - first > 1:
                if error.kind == TOO_LARGE:
                    self._learn(written.size(first, last) // 2)
                waiting += [(middle, last), (first, middle)]
            else:
                return first, error
        return end, None

    def _bytes_max(self) -> int:
        """The largest request of several messages that the endpoint is thought to take."""
        return self._learned[0] if time.monotonic() < self._learned[1] else _REQUEST_BYTES_MAX

    def _learn(self, bytes_max: int) -> None:
        """The endpoint refused a request for its size: send smaller ones for a while."""
        self._learned = (max(1, min(bytes_max, self._bytes_max())), time.monotonic() + _LEARNED_S)

    def _send(
        self, url: httpx.URL, written: _Written, start: int, end: int, retries: int
    ) -> WalbrookError | None:
        text = written.text(start, end)
        body: Body = (b'{"data":[', text, b"]}") if self._batch else (text,)
        key = f"{self._consumer}:{written.name(start, end)}"
        for attempt in range(retries + 1):
            answer, error = self._attempt(url, body, key)
            if not isinstance(error, TransientError) or attempt == retries:
                return error
            if error.kind == _GONE:
                # Whoever else is being delivered to need not wait while nobody is there: it is
                # tried again later, by itself.
                return error
            backoff = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2**attempt) * random.uniform(0.5, 1)
            self._wait(max(backoff, wait_asked_for(answer, now=time.time()) if answer else 0.0))
        raise AssertionError("retries are not negative")

    def _attempt(
        self, url: httpx.URL, body: Body, key: str
    ) -> tuple[Answer | None, WalbrookError | None]:
        try:
            answer = self._client.exchange(url, key, body)
        except (ConnectError, BadAnswerError, OSError) as error:
            return None, self._connection_error(error)
        return answer, meaning(answer, self._place, self._secrets)

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
        self._named = np.column_stack((self._lsn, self._idx, gaps))

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
        first, last = (Cursor(int(self._lsn[at]), int(self._idx[at])) for at in (start, end - 1))
        return f"{first}-{last}:{xxhash.xxh3_64_hexdigest(self._named[start:end].data)}"


def below(url: httpx.URL, route: str) -> httpx.URL:
    """The path ``route`` below a URL, on the same server and with the same query."""
    path, question, query = url.raw_path.partition(b"?")
    return url.copy_with(raw_path=path.rstrip(b"/") + route.encode() + question + query)


def _secrets(url: httpx.URL, headers: Mapping[str, str]) -> tuple[str, ...]:
    """What a receiver could repeat in its answer and nobody may read in an error."""
    parts = [url.password, *url.params.values()]
    for value in headers.values():
        parts += [value, *value.split()]
    return tuple(sorted({part for part in parts if part}, key=len, reverse=True))
