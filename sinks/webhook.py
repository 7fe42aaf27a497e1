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
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

import httpx
import numpy as np
import pyarrow.compute as pc
import xxhash

from cdc.change import MessageBatch
from cdc.decoding.joins import joined
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.queue.retry import kind_of
from sinks.base import Accepted, Delivery, nobody_asks
from sinks.columns import by_route, pieces, text_bytes
from sinks.http_answers import Answer, meaning, wait_asked_for

_REQUEST_BYTES_MAX = 8 << 20
_ANSWER_BYTES_MAX = 4096
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
        self._method = method
        self._batch = batch
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._wait = wait
        self._secrets = _secrets(self._url, headers or {})
        self._client = httpx.Client(
            headers={"Content-Type": "application/json", **(headers or {})},
            timeout=timeout_s,
            verify=verify,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=1),
        )

    def deliver(self, batch: MessageBatch, accepted: Accepted = nobody_asks) -> Delivery:
        """Send the messages in order, up to the first request that is not answered with 2xx."""
        settled = 0
        for route, run in by_route(batch):
            url = self._url if route is None else below(self._url, route)
            for piece, _ in pieces(
                run,
                batch.shape.message_parts,
                messages_max=self._messages_max,
                bytes_max=_REQUEST_BYTES_MAX,
            ):
                count, error = self._send_isolating(url, piece, accepted)
                settled += count
                if error is not None:
                    return Delivery(settled, error=error)
        return Delivery(settled)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _send_isolating(
        self, url: httpx.URL, batch: MessageBatch, accepted: Accepted
    ) -> tuple[int, WalbrookError | None]:
        """Send; a request that may be one message's fault is halved until that is found alone."""
        count, waiting = 0, [batch]
        while waiting:
            part = waiting.pop()
            # What is cut was tried often enough as a whole.
            error = self._send(url, part, self._max_retries if part is batch else 0)
            if error is None:
                count += len(part)
                error = accepted(part)
                if error is not None:
                    return count, error
            elif kind_of(error) is not None and len(part) > 1:
                half = len(part) // 2
                waiting += [part.slice(half), part.slice(0, half)]
            else:
                return count, error
        return count, None

    def _send(self, url: httpx.URL, batch: MessageBatch, retries: int) -> WalbrookError | None:
        body = self._body(batch)
        key = f"{self._consumer}:{batch.cursor(0)}-{batch.cursor(-1)}:{_digest(batch)}"
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
        self, url: httpx.URL, body: bytes, key: str
    ) -> tuple[Answer | None, WalbrookError | None]:
        try:
            answer = self._exchange(url, body, key)
        except httpx.InvalidURL as error:
            return None, OperatorError(f"the webhook's url is not one: {error}", fix="correct it")
        except httpx.HTTPError as error:
            return None, self._connection_error(error)
        return answer, meaning(answer, self._url.netloc.decode(), self._secrets)

    def _exchange(self, url: httpx.URL, body: bytes, key: str) -> Answer:
        deadline = time.monotonic() + self._timeout_s
        excerpt = b""
        with self._client.stream(
            self._method, url, content=body, headers={"Idempotency-Key": key}
        ) as response:
            try:
                for chunk in response.iter_bytes():
                    # Read to its end, a small answer leaves the connection open for the next one.
                    excerpt += chunk
                    if len(excerpt) >= _ANSWER_BYTES_MAX or time.monotonic() > deadline:
                        break
            except httpx.HTTPError:
                pass  # the status has said what became of the request; the body only explains it
            return Answer(response.status_code, response.headers.get("Retry-After", ""), excerpt)

    def _body(self, batch: MessageBatch) -> bytes:
        shaped = batch.messages()
        if not self._batch:
            return bytes(memoryview(text_bytes(joined(shaped))))
        listed = memoryview(text_bytes(joined(shaped, ",")))
        return b"".join((b'{"data":[', listed[:-1], b"]}"))

    def _connection_error(self, error: httpx.HTTPError) -> WalbrookError:
        place = self._url.netloc.decode()
        if isinstance(error, httpx.UnsupportedProtocol):
            return OperatorError(
                f"the webhook's url for {place} is not http or https", fix="correct the url"
            )
        if _certificate_refused(error):
            return OperatorError(
                f"the certificate of {place} is not trusted",
                fix="install one that is, or set verify to false for a server you trust",
            )
        gone = isinstance(error, httpx.ConnectError | httpx.TimeoutException)
        return TransientError(
            f"the request to {place} failed: {type(error).__name__}",
            fix="it is retried; check that the endpoint is up and reachable",
            kind=_GONE if gone else "",
        )


def _digest(batch: MessageBatch) -> str:
    """Of what is in a request: between its first and its last message some may be left out."""
    cursors = (batch.rows.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
    gaps = pc.equal(batch.rows.column("action"), "gap").to_numpy(zero_copy_only=False)
    return xxhash.xxh3_64_hexdigest(np.concatenate([*cursors, gaps.astype(np.int64)]).tobytes())


def below(url: httpx.URL, route: str) -> httpx.URL:
    """The path ``route`` below a URL, on the same server and with the same query."""
    path, question, query = url.raw_path.partition(b"?")
    return url.copy_with(raw_path=path.rstrip(b"/") + route.encode() + question + query)


def _certificate_refused(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _secrets(url: httpx.URL, headers: Mapping[str, str]) -> tuple[str, ...]:
    """What a receiver could repeat in its answer and nobody may read in an error."""
    parts = [url.password, *url.params.values()]
    for value in headers.values():
        parts += [value, *value.split()]
    return tuple(sorted({part for part in parts if part}, key=len, reverse=True))
