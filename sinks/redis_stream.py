"""A Redis stream whose entry ids are the cursors.

Redis refuses an id at or below the stream's top, so a replayed message is absorbed by the server
itself. The same rule is a trap: were a message refused for another reason while later ones got in,
its retry would look like a duplicate. Invariant: nothing is sent after a message that
was refused for any reason but its id. So a request is one transaction, which the server queues
whole or drops whole, and the next one goes out only after its answer. Nor does a batch go out
before the stream's top was seen to be ours: behind another writer's entry, or an id that another
writer made, it would look delivered.

To look at the stream before each delivery would cost a round trip. So the question for the next one
is sent behind each delivery, with a WATCH before it, and answered by the time it is needed. A
stream that another writer has touched since ends the next transaction before it begins; then it is
looked at again, and only then the same messages are sent. The record beside the stream
(``redis_record``) is watched in every transaction: a sink that a rewind has made out of date adds
nothing to a stream that was emptied.

Where messages have routes, the tops of all streams are looked at before a batch. One transaction
adds to several, so the server must be one that does that: not a cluster.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol, cast

import pyarrow as pa
import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.retry import Retry

from cdc.backfill.table import PublishedTable
from cdc.change import MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.cursor_columns import prefix_at_or_below
from cdc.errors import PoisonError, ProtocolError, TransientError, WalbrookError
from cdc.failpoints import reached
from cdc.generation import FIRST, Generation
from cdc.queue.retry import TOO_LARGE
from cdc.verify.held import Form, Key
from sinks.base import Delivery
from sinks.columns import pieces
from sinks.held_messages import refuse_short_lived
from sinks.redis_errors import from_exception, from_reply
from sinks.redis_read_back import read_stream
from sinks.redis_record import (
    FIELDS,
    Record,
    StreamState,
    entry_id,
    ids_moved,
    needs_rights,
    record_key,
)
from sinks.redis_tops import ASKED_AT_ONCE, StreamTops, keys_of, last_of_each, streams_of
from sinks.redis_trim import AgeTrim, Entry
from sinks.redis_wire import (
    TransactionReply,
    encode,
    encode_question,
    is_answer,
    read_outcome,
    usual_answer,
    with_command,
)

_REQUEST_BYTES = 512 << 10  # larger ones cost the server more a message, and hold others up
_REQUEST_MESSAGES_MAX = 4096
_ONE_PACKET_BYTES = 64 << 10  # up to so many a copy costs less than a call of the system
_MESSAGE_BYTES_MAX = 256 << 20  # the server hangs up on fields of 512 MB
_RECEIVE_BYTES = 64 << 10
_TRIES_MAX = 20  # of one request, while others touch the stream
_NO_STREAM = "no such key"


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
        max_length: int | None = None,
        max_age_s: float | None = None,
        trim_exactly: bool = False,
        generation: Generation = FIRST,
    ) -> None:
        self._key = stream_key
        self._generation = generation
        self._exactness = "=" if trim_exactly else "~"
        self._length = () if max_length is None else ("MAXLEN", self._exactness, str(max_length))
        self._age = None if max_age_s is None else AgeTrim(max_age_s)
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
        self._pool = pool
        self._connection = cast(_Connection, pool.make_connection())
        self._open = False
        self._tops = StreamTops(consumer)
        self._asked: str | None = None  # the stream that is watched, and whose answers are to come
        # The answer to a brief question if no other writer was there.
        self._usual: bytes | None = None
        self._truncation = 0  # as the record says
        self._may_watch = True  # and describe the stream, and keep its record
        self._others = 0  # commands of the request under way that add nothing

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Add the messages in order, up to the first one that the server cannot take."""
        settled = absorbed = 0
        top: Cursor | None = None
        try:
            self._connect()
            streams = keys_of(batch, self._key, self._generation)
            top = self._look(streams, batch)
            self._trim(streams)
            requests = self._requests(batch)
            request = next(requests, None)
            while request is not None:
                if isinstance(request, PoisonError):
                    return Delivery(settled, absorbed, request, top=top)
                piece, keys, _ = request
                self._send(streams, request)
                following = next(requests, None)  # encoded while the server works
                outcome = self._outcome(len(piece))
                for _ in range(_TRIES_MAX):
                    if not outcome.touched:
                        break
                    # Another writer was there since the stream was looked at; nothing was added.
                    found = self._look(streams, piece, again=True)
                    top = top if settled else found
                    self._send(streams, request)
                    outcome = self._outcome(len(piece))
                self._refuse_moved(streams, piece, outcome)
                settled, absorbed = settled + outcome.settled, absorbed + outcome.absorbed
                self._tops.written(last_of_each(piece, keys, outcome.settled))
                if outcome.refusal or outcome.touched:
                    return Delivery(settled, absorbed, _refusal(outcome), top=top)
                if self._is_watched(streams) and isinstance(following, tuple):
                    self._ask_ahead(streams)
                    self._look(streams, following[0])
                request = following
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

    def probe(self) -> str:
        """Connect, authenticate and look at the stream; nothing is added."""
        stream = self._generation.named(self._key)
        try:
            self._connection.connect()
            self._connection.send_command("XINFO", "STREAM", stream.encode())
            answer = self._answer()
            if isinstance(answer, redis.exceptions.NoPermissionError):
                return f"connected; the account may not describe {stream}, so it is not checked"
            state = _state(answer)
            if state is None:
                return f"connected; the stream {stream} is not there yet; adding is not checked"
            if state.last_entry is not None:
                self._tops.seen(stream, [state.last_entry])
            return f"connected; the stream {stream} is this sink's; adding is not checked"
        except (redis.RedisError, OSError) as error:
            raise from_exception(error) from error
        finally:
            self.close()

    @property
    def held_form(self) -> Form:
        return Form.RECORD

    def read_back(
        self, table: PublishedTable, keys: Collection[Key] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The messages of the stream that are about a table, over a connection of its own."""
        stream = self._generation.named(self._key)
        if self._length or self._age is not None:
            raise refuse_short_lived(f"the stream {stream}", "max_length and max_age_s")
        return read_stream(self._pool.make_connection(), stream, table, keys)

    def close(self) -> None:
        """Hang up; the next delivery connects again."""
        self._open = False
        self._asked = None
        self._connection.disconnect()

    def _connect(self) -> None:
        if self._open:
            return
        self._connection.connect()
        self._tops.forget()
        self._point()
        self._open = True

    def _is_watched(self, streams: str | pa.StringArray) -> bool:
        """Whether the record of the only stream is watched while messages are added."""
        return isinstance(streams, str) and self._may_watch

    def _send(self, streams: str | pa.StringArray, request: _Request) -> None:
        piece, _, command = request
        if isinstance(streams, str) and self._may_watch:
            last = max(piece.cursor(-1), self._tops.top(streams))
            record = record_key(streams)
            command = with_command(command, "HSET", record, "top", entry_id(last))
        self._others = 1 if self._is_watched(streams) else 0
        if sum(map(len, command)) <= _ONE_PACKET_BYTES:
            command = [b"".join(command)]
        self._connection.send_packed_command(command, check_health=False)

    def _look(
        self, streams: str | pa.StringArray, batch: MessageBatch, *, again: bool = False
    ) -> Cursor | None:
        """Whether messages may be added to the streams as they are. Returns the only one's top.

        ``again``: others touch the stream all the time, so its record alone is watched.
        """
        if self._asked is not None and not (isinstance(streams, str) and streams == self._asked):
            self.close()  # it was asked about another stream
            self._connect()
        while isinstance(streams, str) and self._may_watch:
            if self._asked is None:
                self._ask(streams, [record_key(streams)] if again else None)
            self._asked = None
            if self._usual is not None:
                if is_answer(self._receiver(), self._usual):
                    return self._tops.top(streams)
                # Another writer was there, or the account may not ask: a new connection watches
                # nothing, and a whole question says what is wrong.
                self.close()
                self._connect()
                continue
            answers = [self._answer() for _ in range(3)]
            if any(isinstance(each, redis.exceptions.NoPermissionError) for each in answers):
                self._may_watch = False
                self.close()  # a new connection watches nothing
                self._connect()
                break
            record, state = Record.read(_sound(answers[1])), _state(answers[2])
            self._truncation = record.truncation
            if not self._generation.must_empty(record.truncation):
                return self._tops.looked(streams, state, record, batch.cursor(0))
            self._truncate(streams, exists=state is not None)
            again = True
        return self._look_plainly(streams)

    def _look_plainly(self, streams: str | pa.StringArray) -> Cursor | None:
        """The same by an account that may do little, and for streams that routes name."""
        top = None
        if isinstance(streams, str):
            if self._generation.truncation:
                raise needs_rights(streams)
            self._connection.send_command("XINFO", "STREAM", streams.encode())
            answer = self._answer()
            if not isinstance(answer, redis.exceptions.NoPermissionError):
                state = _state(answer)
                if state is None:
                    self._tops.forget()  # it is not what we added to
                top = ORIGIN if state is None else state.last_id
        self._refuse_strangers(streams_of(streams))
        return top

    def _ask_ahead(self, streams: str | pa.StringArray) -> None:
        """Ask for what the next delivery must know; the answers are read then."""
        if not isinstance(streams, str) or not self._may_watch:
            return
        try:
            self._ask(streams, above=self._tops.above(streams))
        except (redis.RedisError, OSError):
            self.close()  # what was delivered is safe; the next delivery connects again

    def _ask(self, stream: str, watched: list[str] | None = None, above: str | None = None) -> None:
        """Ask about a stream; briefly (``above``) if all of it below is known."""
        record = record_key(stream)
        question = encode_question(stream, record, watched or [stream, record], FIELDS, above)
        self._connection.send_packed_command([question], check_health=False)
        self._asked, self._usual = stream, None
        if above is not None:
            self._usual = usual_answer(self._truncation, entry_id(self._tops.top(stream)))

    def _answer(self) -> Any:
        """The next answer; one that says no is returned, not raised."""
        try:
            return self._connection.read_response()
        except redis.ResponseError as error:
            return error

    def _ask_once(self, *words: str) -> Any:
        self._connection.send_command(*(word.encode() for word in words))
        return self._connection.read_response()

    def _truncate(self, stream: str, *, exists: bool) -> None:
        """Empty a stream that was looked at, and is watched, in one transaction.

        Its readers' groups are there again afterwards, and begin with the first entry.
        """
        reached("truncating")
        found = self._ask_once("XINFO", "GROUPS", stream) if exists else []
        groups = [dict(zip(each[::2], each[1::2], strict=True))[b"name"] for each in found]
        truncation = str(self._generation.truncation)
        self._transact(
            ("UNLINK", stream),
            *(("XGROUP", "CREATE", stream, group.decode(), "0", "MKSTREAM") for group in groups),
            ("HSET", record_key(stream), "truncation", truncation, "top", entry_id(ORIGIN)),
            ("HDEL", record_key(stream), "moved"),
        )
        self._tops.forget()
        reached("truncated")

    def _transact(self, *commands: tuple[str, ...]) -> bool:
        """Run these commands; returns whether no watched key was touched."""
        self._ask_once("MULTI")
        for words in commands:
            self._ask_once(*words)
        return self._ask_once("EXEC") is not None

    def _point(self) -> None:
        """Say at the record of the first generation where the current one is."""
        number = self._generation.number
        if number == 1:
            return
        record = record_key(self._key)
        try:
            for _ in range(_TRIES_MAX):
                self._ask_once("WATCH", record)
                if int(self._ask_once("HGET", record, "generation") or 1) >= number:
                    self._ask_once("UNWATCH")
                    return
                stream = self._generation.named(self._key)
                if self._transact(("HSET", record, "generation", str(number), "stream", stream)):
                    return
        except redis.exceptions.NoPermissionError as error:
            raise needs_rights(self._key) from error

    def _trim(self, streams: str | pa.StringArray) -> None:
        """Remove what is too old; our own watch is touched by that, and the stream seen again."""
        if self._age is None:
            return
        now = time.time()
        for key in self._age.due(streams_of(streams), now):
            least = self._age.least_id(key, self._first_entry, now)
            if least is not None:
                self._ask_once("XTRIM", key, "MINID", self._exactness, least)

    def _first_entry(self, key: str, at: str) -> Entry | None:
        found = self._ask_once("XRANGE", key, at, "+", "COUNT", "1")
        return found[0] if found else None

    def _refuse_moved(
        self, streams: str | pa.StringArray, piece: MessageBatch, outcome: TransactionReply
    ) -> None:
        """Refuse a stream that took messages of ours for repeats which it did not have.

        No process of ours added them meanwhile: the record is watched. XSETID touches no watch.
        """
        if outcome.absorbed and isinstance(streams, str) and self._may_watch:
            ours = self._tops.top(streams)
            if outcome.absorbed > prefix_at_or_below(piece.rows, ours):
                self._ask_once("HSET", record_key(streams), "moved", entry_id(ours))
                raise ids_moved(streams, ours)

    def _refuse_strangers(self, streams: list[str]) -> None:
        """Entries of another writer would make Redis refuse ours, which would look delivered."""
        for start in range(0, len(streams), ASKED_AT_ONCE):
            asked = streams[start : start + ASKED_AT_ONCE]
            for key in asked:
                above = self._tops.above(key)
                self._connection.send_command("XREVRANGE", key.encode(), "+", above, "COUNT", 1)
            for key in asked:
                self._tops.seen(key, self._connection.read_response())

    def _outcome(self, messages: int) -> TransactionReply:
        return read_outcome(self._receiver(), messages, self._others)

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
            keys = keys_of(piece, self._key, self._generation)
            yield piece, keys, encode(keys, piece, self._length)


def _state(answer: Any) -> StreamState | None:
    """What XINFO said of a stream; None if there is none."""
    if isinstance(answer, redis.ResponseError) and _NO_STREAM in str(answer):
        return None
    return StreamState.read(_sound(answer))


def _sound(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _refusal(outcome: TransactionReply) -> WalbrookError:
    if outcome.touched:
        return TransientError(
            "another process adds to the stream at the same time", fix="it is retried"
        )
    error = from_reply(outcome.refusal)
    if not outcome.torn:
        return error
    return ProtocolError(
        f"{error.what}; yet it took later messages, so this one is missing from the stream",
        fix="give the consumer a new stream_key, on a server whose transactions are whole",
        detail=error.detail,
    )
