"""The limit of a client in Python: a bare psycopg loop that drains a slot and keeps nothing."""

from __future__ import annotations

import select
import time
from contextlib import closing

import psycopg
from psycopg import pq, sql

from benchmarks.source import WrittenRows
from cdc.cursor import parse_lsn
from cdc.errors import ProtocolError, TransientError
from demo.embedded_postgres import EmbeddedPostgres

_TIMEOUT_S = 600.0
_POLL_MS = 1_000
_XLOG_HEADER = 25  # a kind, two positions and a time
_START = sql.SQL(
    "START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names {names})"
)


def drain(postgres: EmbeddedPostgres, slot: str, load: WrittenRows) -> float:
    """Read the slot up to the end of ``load``; rows a second from the start of streaming."""
    end = parse_lsn(load.end_lsn)
    with closing(
        psycopg.connect(
            postgres.dsn, replication="database", autocommit=True, options="-c wal_sender_timeout=0"
        )
    ) as connection:
        command = _START.format(
            slot=sql.Identifier(slot), names=sql.Literal(load.publication)
        ).as_bytes(connection)
        wire = connection.pgconn
        wire.send_query(command)
        while wire.flush():
            pass
        answer = wire.get_result()
        if answer is None or answer.status != pq.ExecStatus.COPY_BOTH:
            raise ProtocolError(f"the server did not stream the slot {slot}")
        started_at = time.perf_counter()
        rows = _drained(wire, end, started_at + _TIMEOUT_S)
        ended_at = time.perf_counter()
    if rows < load.rows:
        raise ProtocolError(f"the slot {slot} gave {rows} of {load.rows} rows")
    return rows / (ended_at - started_at)


def _drained(wire: pq.abc.PGconn, end: int, deadline: float) -> int:
    """How many inserts came before the first transaction that commits behind ``end``."""
    waiting = select.poll()
    waiting.register(wire.socket, select.POLLIN)
    rows = 0
    while True:
        size, message = wire.get_copy_data(1)
        if size > 0:
            data = bytes(message)
            kind = data[_XLOG_HEADER : _XLOG_HEADER + 1] if data[:1] == b"w" else b""
            if kind == b"I":
                rows += 1
            elif kind == b"B" and int.from_bytes(data[_XLOG_HEADER + 1 : _XLOG_HEADER + 9]) > end:
                return rows
            continue
        if size < 0:
            raise ProtocolError("the server ended the stream")
        if time.perf_counter() > deadline:
            raise TransientError(f"the slot was not drained within {_TIMEOUT_S:g} s")
        waiting.poll(_POLL_MS)
        wire.consume_input()
