"""A Redis stream whose entry ids are the cursors.

Redis refuses an id at or below the stream's top, so a replayed message is absorbed by the server
itself. The same rule is a trap: were a message refused for another reason while later ones got in,
its retry would look like a duplicate. What must always hold: nothing is sent after a message that
was refused for any reason but its id. So a request is one transaction, which the server queues
whole or drops whole, and the next one goes out only after its answer. Nor does a batch go out
before the stream's top was seen to be ours: behind another writer's entry it would look delivered.

To ask for the top before each delivery would cost round trips. So the question for the next one is
sent behind each delivery, with a WATCH before it, and answered by the time it is needed. A stream
that anybody else has touched since ends the next transaction before it begins; then it is asked for
again, and only then the same messages are sent.

Where messages have routes, all of this holds for each stream that a batch goes to. One transaction
adds to several, so the server must be one that does that: not a cluster.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.retry import Retry

from cdc.change import MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import PoisonError, ProtocolError, WalbrookError
from cdc.queue.retry import TOO_LARGE
from sinks.base import Delivery
from sinks.columns import pieces
from sinks.redis_errors import from_exception, from_reply
from sinks.redis_tops import ASKED_AT_ONCE, StreamTops, keys_of, last_of_each, streams_of
from sinks.redis_wire import Outcome, encode, encode_watch, read_outcome, read_watched

_REQUEST_BYTES = 512 << 10  # larger ones cost the server more a message, and hold others up
_REQUEST_MESSAGES_MAX = 4096
_MESSAGE_BYTES_MAX = 256 << 20  # the server hangs up on fields of 512 MB
_RECEIVE_BYTES = 64 << 10
_LAST_ID = b"last-generated-id"


class _Connection(Protocol):
    """What is used of redis-py: it connects, authenticates and reads answers; we encode."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def send_command(self, *parts: bytes | str | int) -> None: ...
    def read_response(self) -> Any: ...
    def send_packed_command(
        self, command: list[bytes | pa.Buffer], check_health: bool = True
    ) -> None: ...
    @property
    def _sock(self) -> socket.socket | None: ...


_Request = tuple[MessageBatch, str | pa.StringArray, list[bytes | pa.Buffer]]
"""The messages it holds, their streams, and its bytes."""


class RedisStreamSink:
    """Adds to its streams over one connection, opened when it is first needed."""

    def __init__(
        self,
        *,
        consumer: str,
        stream_key: str,
        batch_size: int,
        timeout_s: float,
        url: str | None = None,
        host: str = "localhost",
        port: int = 6379,
        database: int = 0,
        username: str | None = None,
        password: str | None = None,
        tls: bool = False,
        tls_verify: bool = True,
        tls_ca_file: str | None = None,
    ) -> None:
        self._key = stream_key
        self._timeout_s = timeout_s
        self._messages_max = min(batch_size, _REQUEST_MESSAGES_MAX)
        settings: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        if tls or (url or "").startswith("rediss:"):
            settings |= {
                "ssl_cert_reqs": "required" if tls_verify else "none",
                "ssl_check_hostname": tls_verify,
                "ssl_ca_certs": tls_ca_file,
            }
        if url is not None:
            pool = redis.ConnectionPool.from_url(url, **settings)
        else:
            pool = redis.ConnectionPool(
                connection_class=SSLConnection if tls else Connection,
                host=host,
                port=port,
                db=database,
                username=username,
                password=password,
                **settings,
            )
        self._connection = cast(_Connection, pool.make_connection())
        self._open = False
        self._tops = StreamTops(consumer)
        self._last_id: Cursor | None = None  # of the own stream, as it was at the first delivery
        self._asked: str | None = None  # the stream that is watched, and whose answers are to come
        self._may_watch = True

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Add the messages in order, up to the first one that the server cannot take."""
        settled = absorbed = 0
        top: Cursor | None = None
        try:
            self._connect()
            streams = keys_of(batch, self._key)
            watched, top = self._look(streams)
            requests = self._requests(batch)
            request = next(requests, None)
            while request is not None:
                if isinstance(request, PoisonError):
                    return Delivery(settled, absorbed, request, top=top)
                piece, keys, command = request
                self._connection.send_packed_command(command, check_health=False)
                request = next(requests, None)  # encoded while the server works
                outcome = self._outcome(len(piece))
                if outcome.touched and watched:
                    # Somebody was there since the stream was looked at; nothing was added.
                    watched, top = False, self._look_now(streams)
                    self._connection.send_packed_command(command, check_health=False)
                    outcome = self._outcome(len(piece))
                watched = False
                settled, absorbed = settled + outcome.settled, absorbed + outcome.absorbed
                self._tops.written(last_of_each(piece, keys, outcome.settled))
                if outcome.refusal:
                    return Delivery(settled, absorbed, _refusal(outcome), top=top)
        except (redis.RedisError, OSError) as error:
            self.close()
            return Delivery(settled, absorbed, from_exception(error), top=top)
        except WalbrookError as error:
            self.close()
            return Delivery(settled, absorbed, error, top=top)
        except BaseException:
            # An answer may be outstanding; the next delivery must not take it for its own.
            self.close()
            raise
        self._ask_ahead(streams)
        return Delivery(settled, absorbed, top=top)

    def close(self) -> None:
        """Hang up; the next delivery connects again."""
        self._open = False
        self._asked = None
        self._connection.disconnect()

    def _connect(self) -> None:
        if self._open:
            return
        self._connection.connect()
        self._forget()
        self._open = True

    def _forget(self) -> None:
        self._tops.forget()
        self._last_id = None

    def _look(self, streams: str | pa.StringArray) -> tuple[bool, Cursor | None]:
        """Whether the streams are watched, and the top of the only one; refuses strangers."""
        if self._asked is None:
            return False, self._look_now(streams)
        key, self._asked = self._asked, None
        watched = read_watched(self._receiver())
        if key == streams and watched.is_usual:
            return True, self._top(key, exists=True)
        # Somebody else was there, the account may not ask, or it is about other streams now: a new
        # connection watches nothing, and one question at a time says what is wrong.
        self._may_watch = self._may_watch and not watched.refused
        self.close()
        self._connect()
        return False, self._look_now(streams)

    def _look_now(self, streams: str | pa.StringArray) -> Cursor | None:
        """The same of streams as they are now, with a round trip for each question."""
        exists = self._exists(streams) if isinstance(streams, str) else None
        if exists is False:
            self._forget()  # it is not what we added to
        self._refuse_strangers(streams_of(streams))
        return self._top(streams, exists) if isinstance(streams, str) else None

    def _ask_ahead(self, streams: str | pa.StringArray) -> None:
        """Ask for what the next delivery must know; the answers are read then."""
        if not isinstance(streams, str) or not self._may_watch:
            return
        try:
            question = encode_watch(streams, self._tops.above(streams))
            self._connection.send_packed_command([question], check_health=False)
        except (redis.RedisError, OSError):
            self.close()  # what was delivered is safe; the next delivery connects again
        else:
            self._asked = streams

    def _exists(self, key: str) -> bool | None:
        """Whether there is such a stream; None if the account may not ask."""
        try:
            self._connection.send_command("EXISTS", key.encode())
            return bool(self._connection.read_response())
        except redis.exceptions.NoPermissionError:
            return None

    def _top(self, key: str, exists: bool | None) -> Cursor | None:
        """The last entry that a stream had, also if its readers have deleted it."""
        if not exists:
            return None if exists is None else ORIGIN
        if self._last_id is None:
            try:
                self._connection.send_command("XINFO", "STREAM", key.encode())
                said = self._connection.read_response()
            except redis.exceptions.NoPermissionError:
                return None
            lsn, _, idx = dict(zip(said[::2], said[1::2], strict=True))[_LAST_ID].partition(b"-")
            self._last_id = Cursor(int(lsn), int(idx))
        return max(self._last_id, self._tops.top(key))

    def _refuse_strangers(self, streams: list[str]) -> None:
        """Entries of another writer would make Redis refuse ours, which would look delivered."""
        for start in range(0, len(streams), ASKED_AT_ONCE):
            asked = streams[start : start + ASKED_AT_ONCE]
            for key in asked:
                above = self._tops.above(key)
                self._connection.send_command("XREVRANGE", key.encode(), "+", above, "COUNT", 1)
            for key in asked:
                self._tops.seen(key, self._connection.read_response())

    def _outcome(self, messages: int) -> Outcome:
        return read_outcome(self._receiver(), messages)

    def _receiver(self) -> Callable[[], bytes]:
        """Gives what the server sends, within the timeout."""
        wire = self._connection._sock
        assert wire is not None
        deadline = time.monotonic() + self._timeout_s

        def receive() -> bytes:
            part = wire.recv(_RECEIVE_BYTES)
            if not part:
                raise ConnectionError("the server hung up")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no whole answer within {self._timeout_s:g} s")
            return part

        return receive

    def _requests(self, batch: MessageBatch) -> Iterator[_Request | PoisonError]:
        for piece, size in pieces(
            batch,
            batch.shape.entry_parts,
            messages_max=self._messages_max,
            bytes_max=_REQUEST_BYTES,
        ):
            if size > _MESSAGE_BYTES_MAX:
                yield PoisonError(
                    f"the message at {piece.cursor(0)} has {size} bytes, "
                    f"more than the {_MESSAGE_BYTES_MAX} that are sent to Redis",
                    fix="it becomes a dead letter; bring the destination up to date by other means",
                    kind=TOO_LARGE,
                )
            keys = keys_of(piece, self._key)
            yield piece, keys, encode(keys, piece)


def _refusal(outcome: Outcome) -> WalbrookError:
    error = from_reply(outcome.refusal)
    if not outcome.torn:
        return error
    return ProtocolError(
        f"{error.what}; yet it took later messages, so this one is missing from the stream",
        fix="give the consumer a new stream_key, on a server whose transactions are whole",
        detail=error.detail,
    )
