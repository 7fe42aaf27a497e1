"""The replication connection: psycopg's ``pq`` layer, COPY BOTH, never blocking inside libpq.

The blocking form of ``get_copy_data`` would hold the interpreter lock; so the socket is polled,
libpq reads it (so that TLS works), and messages are taken until there are none.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import psycopg
from psycopg import pq, sql
from psycopg.pq.abc import PGresult

from cdc.connection import LIVENESS, with_options
from cdc.cursor import format_lsn
from cdc.errors import ProtocolError, TransientError
from cdc.replication.deadline import deadline
from cdc.replication.options import StreamOptions, plugin_options
from cdc.replication.protocol import (
    KEEPALIVE,
    XLOG_DATA,
    Keepalive,
    parse_keepalive,
    server_end_lsn,
    status_update,
)

PINNED = {
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "quote_all_identifiers": "off",
    "search_path": "pg_catalog",
}
"""What changes the text form of values is pinned, so that a row reads the same on every server.

The last two do so for types that name an object, such as regclass: it comes with its schema.
"""

SILENCE_S = 30.0
"""A server that sends nothing for this long, though asked, is gone."""

_SETTINGS = {**PINNED, "statement_timeout": "0"}
_SEND_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 30.0  # the server may first have to read what it saved of the slot
_TRANSACTION_TIMEOUT_FROM = 170_000
_NAME_MAX = 63  # the server cuts what is longer
_PLAIN = StreamOptions()
_UNTRANSLATABLE = (b"22P05", b"22021")  # of one encoding, in another


def stream_name(slot: str) -> str:
    """What the server calls the connection that reads ``slot``."""
    return f"walbrook:{slot}"[:_NAME_MAX]


class UntranslatableError(TransientError):
    """A text of the database has no form in UTF-8: reconnect and take texts as they are stored."""


class ReplicationStream:
    """A slot being read, from the moment START_REPLICATION was answered."""

    def __init__(
        self,
        dsn: str,
        *,
        slot: str,
        publication: str,
        start_lsn: int,
        options: StreamOptions = _PLAIN,
        check: Callable[[psycopg.Connection[tuple[object, ...]]], None] | None = None,
        as_stored: bool = False,
        silence_s: float = SILENCE_S,
    ) -> None:
        """``check`` may look at who answers, over this connection, before anything is read.

        ``silence_s``: how long the caller waits for a sign of life before it gives up. A server
        that skips a large transaction reads our feedback, and answers it, only every half of
        ``wal_sender_timeout``: that has to be well within.
        ``as_stored``: take texts in the database's own encoding, which is ``codec`` then.
        """
        self.codec = ""
        self._translated = True  # by the server, to UTF-8
        try:
            self._connection = psycopg.connect(
                dsn,
                replication="database",
                autocommit=True,
                options=with_options(
                    dsn, {**_SETTINGS, "wal_sender_timeout": f"{silence_s * 2000 / 3:.0f}ms"}
                ),
                application_name=stream_name(slot),
                **LIVENESS,
            )
        except psycopg.OperationalError as error:
            raise TransientError(f"the source does not answer: {error}".strip()) from error
        self._pgconn = self._connection.pgconn
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        self.server_lsn = start_lsn
        self.received_at = time.monotonic()
        try:
            if check is not None:
                check(self._connection)
            self._lift_timeout()
            self._choose_encoding(as_stored)
            self._start(slot, publication, start_lsn, options)
        except BaseException:
            self.close()
            raise

    def drain(
        self, into: list[bytes], *, bytes_max: int, rows_max: int
    ) -> tuple[int, Keepalive | None]:
        """Take what libpq already has, up to the bounds; one that asks for a reply ends the round.

        Says how many bytes were taken, and the last keepalive: the server sends one behind almost
        every small transaction. Zero and no keepalive mean: wait for the socket.
        """
        get, append, taken = self._pgconn.get_copy_data, into.append, 0
        data, keepalive = b"", None
        while taken < bytes_max and len(into) < rows_max:
            try:
                size, view = get(1)
            except psycopg.Error as error:
                raise TransientError(f"the replication stream broke: {error}".strip()) from error
            if size <= 0:
                if size < 0:
                    raise self._ended()
                break
            message = bytes(view)
            if message[0] == XLOG_DATA:
                append(message)
                data = message
                taken += size
            elif message[0] == KEEPALIVE:
                keepalive = parse_keepalive(message)
                self.server_lsn = max(self.server_lsn, keepalive.end_lsn)
                if keepalive.reply_requested:
                    break
            else:
                raise ProtocolError(
                    f"an unknown replication message starts with byte {message[:1]!r}",
                    fix="check that nothing but Postgres answers at the configured address",
                )
        if data:
            self.server_lsn = max(self.server_lsn, server_end_lsn(data))
        if data or keepalive is not None:
            self.received_at = time.monotonic()
        return taken, keepalive

    def wait(self, timeout_s: float, also: int) -> None:
        """Sleep until the server or the descriptor ``also`` has something."""
        self._poll.register(also, select.POLLIN)
        try:
            ready = dict(self._poll.poll(max(0.0, timeout_s) * 1000))
        finally:
            self._poll.unregister(also)
        if self._pgconn.socket in ready:
            try:
                self._pgconn.consume_input()
            except psycopg.OperationalError as error:
                raise TransientError(f"the replication stream broke: {error}".strip()) from error

    def confirm(self, *, received_lsn: int, confirmed_lsn: int, reply_requested: bool) -> None:
        """Tell the server where we are; it may forget what lies below ``confirmed_lsn``."""
        update = status_update(
            received_lsn=max(received_lsn, confirmed_lsn),
            confirmed_lsn=confirmed_lsn,
            now_us=time.time_ns() // 1000,
            reply_requested=reply_requested,
        )
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        try:
            while self._pgconn.put_copy_data(update) == 0:
                self._flush(deadline)
            self._flush(deadline)
        except psycopg.OperationalError as error:
            raise TransientError(f"the replication stream broke: {error}".strip()) from error

    def close(self) -> None:
        self._connection.close()

    def _flush(self, deadline: float) -> None:
        while self._pgconn.flush():
            # The server may be waiting for us to read before it reads: listen for both.
            both = select.poll()
            both.register(self._pgconn.socket, select.POLLIN | select.POLLOUT)
            if not both.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TransientError("the server does not take feedback")
            self._pgconn.consume_input()

    def _lift_timeout(self) -> None:
        """The server decodes a transaction within one of its own, however long that takes.

        Servers before 17 do not know the setting, so it cannot be one of the connection's options.
        """
        if self._pgconn.server_version >= _TRANSACTION_TIMEOUT_FROM:
            with deadline(self._connection, _SEND_TIMEOUT_S):
                self._connection.execute("SET transaction_timeout TO 0")

    def _choose_encoding(self, as_stored: bool) -> None:
        """A database without an encoding may hold anything.

        Asked for UTF-8, its server would check every text and end the stream at the first that is
        none; decode can do better than that, and leave out only the row.
        """
        own = (self._pgconn.parameter_status(b"server_encoding") or b"").decode()
        if own == "UTF8" or not (as_stored or own == "SQL_ASCII"):
            return
        with deadline(self._connection, _SEND_TIMEOUT_S):
            self._connection.execute(
                sql.SQL("SET client_encoding TO {}").format(sql.Literal(own)).as_bytes()
            )
        self._translated = False
        if own != "SQL_ASCII":
            self.codec = self._codec(own)

    def _codec(self, encoding: str) -> str:
        try:
            return self._connection.info.encoding
        except psycopg.NotSupportedError:
            raise TransientError(
                f"the source holds text that neither its server nor we can turn from {encoding} "
                "into UTF-8",
                fix="have the WAL read past it: stop the service, move the slot on with "
                "pg_replication_slot_advance, and accept the gap with walbrook.accept_gap",
                kind="untranslatable_text",
            ) from None

    def _start(self, slot: str, publication: str, start_lsn: int, wanted: StreamOptions) -> None:
        options = plugin_options(self._pgconn.server_version, wanted)
        names = ("publication_names", sql.Identifier(publication).as_string(self._connection))
        listed = sql.SQL(", ").join(
            sql.SQL("{} {}").format(sql.Identifier(name), sql.Literal(value))
            for name, value in (*options, names)
        )
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({})").format(
            sql.Identifier(slot),
            # The LSN is neither an identifier nor a literal in this grammar; it is our own number.
            sql.SQL(format_lsn(start_lsn)),
            listed,
        )
        self._pgconn.send_query(command.as_bytes(self._connection))
        try:
            result = self._answer(time.monotonic() + _START_TIMEOUT_S)
        except psycopg.OperationalError as error:
            raise TransientError(f"replication did not start: {error}".strip()) from error
        if result is None or result.status != pq.ExecStatus.COPY_BOTH:
            message = result.get_error_message() if result else "no answer"
            raise TransientError(f"replication from slot {slot} did not start: {message}".strip())

    def _ended(self) -> TransientError:
        """The server ended the stream; what it says of that is its next answer."""
        try:
            result = self._answer(time.monotonic() + _SEND_TIMEOUT_S)
        except (psycopg.OperationalError, TransientError):
            result = None
        reason = result.get_error_message().strip() if result else ""
        what = f"the server ended the replication stream: {reason or 'no reason'}"
        state = result.error_field(pq.DiagnosticField.SQLSTATE) if result else None
        if self._translated and state in _UNTRANSLATABLE:
            return UntranslatableError(what)
        return TransientError(what)

    def _answer(self, deadline: float) -> PGresult | None:
        """What the server says to a command; asked for only once it is there.

        The blocking form would hold the interpreter lock for as long as the server likes.
        """
        self._flush(deadline)
        while self._pgconn.is_busy():
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TransientError("the server does not answer START_REPLICATION")
            self._pgconn.consume_input()
        return self._pgconn.get_result()
