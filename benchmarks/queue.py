"""How many messages a second pull consumers receive and acknowledge, before how long a backlog.

A queue of ``sizes.rows`` messages in the ``sequin`` shape, of as many groups, in a Postgres that
syncs its commits. Claimers are processes of their own, on the same machine, that receive and
acknowledge a hundred messages at a time over SQL: one of them, then eight. What of it is due to the
backlog is said by the same with a hundredth of it.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import median

import psycopg

from benchmarks.sizes import Sizes, progress
from cdc.service.embedded import EmbeddedPostgres
from cdc.state.migrate import migrate

_BATCH = 100
_SHORT = 100  # the short backlog is this many times shorter
_SLICE_S = 10.0  # of the long backlog: how long each number of claimers is measured
_MANY = 8

_REGISTER = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn)
VALUES ('shop', 's', 'p', '1', '0/1');
INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination)
VALUES ('shop', 'jobs', '0/1', 'pull');
SELECT walbrook.make_queue(id) FROM walbrook.consumers;
INSERT INTO walbrook.pulls
SELECT id, 30, 10000, 20, 1000, 600000, NULL, NULL, NULL, 100, '{}' FROM walbrook.consumers;
"""
_FILL = """
INSERT INTO walbrook.records
       (consumer, commit_lsn, commit_idx, group_id, bytes, commit_timestamp, table_schema,
        table_name, action, message)
SELECT c.id, '0/0'::pg_lsn + 1000 * n, 0, hashint8extended(n, 0), length(m), now(), 'public',
       'orders', 'insert', m::json
  FROM walbrook.consumers c, generate_series(%(first)s::bigint, %(last)s::bigint) n,
       LATERAL (SELECT format('{"record":{"id":%%s,"customer":"customer %%s","total":"%%s.50",'
                '"note":"%%s"},"changes":null,"action":"insert","metadata":{"table_schema":'
                '"public","table_name":"orders","commit_timestamp":"2026-01-02T03:04:05.678901Z",'
                '"commit_lsn":%%s,"commit_idx":0,"idempotency_key":"%%s","record_pks":["%%s"]}}',
                n, n %% 5000, n %% 900, repeat('x', 80), 1000 * n, md5(n::text), n) AS m) x
"""
_STORED = """
INSERT INTO walbrook.stored (consumer, commit_lsn, commit_idx)
SELECT id, '0/0'::pg_lsn + 1000 * %s::bigint, 0 FROM walbrook.consumers
    ON CONFLICT (consumer) DO UPDATE SET commit_lsn = excluded.commit_lsn
"""
_RECEIVE = "SELECT ack_id, message::text FROM walbrook.receive('jobs', %s)"
_ACK = "SELECT done FROM walbrook.ack('jobs', %s)"


def run(sizes: Sizes) -> dict[str, object]:
    """Fill and drain a short backlog several times, then measure in front of a long one."""
    short = max(_BATCH, sizes.rows // _SHORT)
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-queue-") as name,
        EmbeddedPostgres(Path(name), settings={"shared_buffers": "512MB"}) as server,
        psycopg.connect(server.dsn, autocommit=True) as connection,
    ):
        migrate(connection)
        connection.execute(_REGISTER)
        figures: dict[int, dict[str, float]] = {1: {}, _MANY: {}}
        filled = 0
        for claimers in figures:
            rates = []
            for _ in range(sizes.rounds):
                filled = _fill(connection, filled, short)
                rates.append(_drained(server.dsn, claimers, seconds=120, messages=short))
            figures[claimers]["short"] = median(rates)
            progress(f"queue: {claimers} of {short} messages: {median(rates):.0f}/s")
        progress(f"queue: storing {sizes.rows} messages")
        filled = _fill(connection, filled, sizes.rows)
        for claimers in figures:
            rate = _drained(server.dsn, claimers, seconds=_SLICE_S, messages=sizes.rows)
            figures[claimers]["long"] = rate
            progress(f"queue: {claimers} of {sizes.rows} messages: {rate:.0f}/s")
    return {
        "backlog": sizes.rows,
        "batch": _BATCH,
        "claims_per_s": round(min(figures[1]["long"], figures[_MANY]["long"])),
        "claims_per_s_1": round(figures[1]["long"]),
        "claims_per_s_8": round(figures[_MANY]["long"]),
        "short_backlog": short,
        "short_claims_per_s_1": round(figures[1]["short"]),
        "short_claims_per_s_8": round(figures[_MANY]["short"]),
        # Above 1: that many times slower in front of the long backlog than of the short one.
        "growth_1": round(figures[1]["short"] / figures[1]["long"], 2),
        "growth_8": round(figures[_MANY]["short"] / figures[_MANY]["long"], 2),
    }


def _fill(connection: psycopg.Connection[tuple[object, ...]], filled: int, messages: int) -> int:
    """Store so many more messages; says how many there have been."""
    with connection.transaction():
        connection.execute(_FILL, {"first": filled + 1, "last": filled + messages})
        connection.execute(_STORED, (filled + messages,))
    return filled + messages


def _drained(dsn: str, claimers: int, *, seconds: float, messages: int) -> float:
    """Messages a second until there is nothing left, or for so long."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Barrier(claimers + 1), context.Value("d", 0.0)
    done = context.Value("q", 0)
    processes = [
        context.Process(target=_claim, args=(dsn, ready, go, done, messages))
        for _ in range(claimers)
    ]
    for process in processes:
        process.start()
    ready.wait(60)
    started = time.monotonic()
    go.value = started + seconds  # until when
    ready.wait(60)
    for process in processes:
        process.join()
    return int(done.value) / (time.monotonic() - started)


def _claim(
    dsn: str,
    ready: multiprocessing.synchronize.Barrier,
    until: Synchronized[float],
    done: Synchronized[int],
    messages: int,
) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT 1")
        ready.wait(60)
        ready.wait(60)
        while time.monotonic() < until.value and done.value < messages:
            rows = connection.execute(_RECEIVE, (_BATCH,)).fetchall()
            if not rows:
                continue
            row = connection.execute(_ACK, ([ack_id for ack_id, _ in rows],)).fetchone()
            assert row is not None
            with done.get_lock():
                done.value += int(str(row[0]))
