"""How many messages a second pull consumers receive and acknowledge, before how long a backlog.

A queue of ``sizes.rows`` messages in the ``sequin`` shape, of as many groups, in a Postgres that
syncs its commits. Claimers are processes of their own, on the same machine, that receive and
acknowledge a hundred messages at a time over SQL: one of them, then eight. What of it is due to the
backlog is said by the same with a hundredth of it. Where other things run beside it, what a message
costs in CPU time, of the claimers and of their backends, says more than the rate does.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg

from benchmarks.sizes import Sizes, progress
from cdc.state.migrate import migrate
from demo.embedded_postgres import EmbeddedPostgres

_BATCH = 100
_SHORT = 100  # the short backlog is this many times shorter
_SLICE_S = 10.0  # of the long backlog: how long each number of claimers is measured
_CLAIMERS = (1, 8)
_SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "16GB", "checkpoint_timeout": "1h"}

_REGISTER = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn)
VALUES ('shop', 's', 'p', '1', '0/1');
INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination)
VALUES ('shop', 'jobs', '0/1', 'pull');
SELECT walbrook.make_queue(id) FROM walbrook.consumers;
INSERT INTO walbrook.pull_settings
SELECT id, 30, 10000, 20, 1000, 600000, NULL, NULL, NULL, 100, '{}' FROM walbrook.consumers;
"""
_FILL = """
INSERT INTO walbrook.pull_messages
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
INSERT INTO walbrook.pull_positions (consumer, commit_lsn, commit_idx)
SELECT id, '0/0'::pg_lsn + 1000 * %s::bigint, 0 FROM walbrook.consumers
    ON CONFLICT (consumer) DO UPDATE SET commit_lsn = excluded.commit_lsn
"""
_RECEIVE = "SELECT ack_id, message::text FROM walbrook.receive('jobs', %s)"
_ACK = "SELECT done FROM walbrook.ack('jobs', %s)"


@dataclass(frozen=True)
class Drained:
    """Messages a second, and what each cost in CPU time."""

    rate: float
    cpu_us: float


def run(sizes: Sizes) -> dict[str, object]:
    """Fill and drain a short backlog several times, then measure in front of a long one."""
    short = max(_BATCH, sizes.rows // _SHORT)
    few: dict[int, Drained] = {}
    many: dict[int, Drained] = {}
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-queue-") as name,
        EmbeddedPostgres(Path(name), settings=_SETTINGS) as server,
        psycopg.connect(server.dsn, autocommit=True) as connection,
    ):
        migrate(connection)
        connection.execute(_REGISTER)
        filled = 0
        for claimers in _CLAIMERS:
            runs = []
            for _ in range(sizes.rounds):
                filled = _fill(connection, filled, short)
                runs.append(_drained(server.dsn, claimers, seconds=120, messages=short))
            few[claimers] = sorted(runs, key=lambda each: each.rate)[len(runs) // 2]
            progress(f"queue: {claimers} claimers, {short} messages: {few[claimers].rate:.0f}/s")
        progress(f"queue: storing {sizes.rows} messages")
        filled = _fill(connection, filled, sizes.rows)
        for claimers in _CLAIMERS:
            many[claimers] = _drained(
                server.dsn, claimers, seconds=_SLICE_S, messages=sizes.rows // 2
            )
            rate = many[claimers].rate
            progress(f"queue: {claimers} claimers, {sizes.rows} messages: {rate:.0f}/s")
    figures: dict[str, object] = {
        "backlog": sizes.rows,
        "short_backlog": short,
        "batch": _BATCH,
        "claims_per_s": round(min(each.rate for each in many.values())),
    }
    for n in _CLAIMERS:
        figures |= {
            f"claims_per_s_{n}": round(many[n].rate),
            f"short_claims_per_s_{n}": round(few[n].rate),
            f"cpu_us_per_message_{n}": round(many[n].cpu_us, 1),
            # Above 1: so many times slower, or dearer, before the long backlog than the short one.
            f"growth_{n}": round(few[n].rate / many[n].rate, 2),
            f"cpu_growth_{n}": round(many[n].cpu_us / few[n].cpu_us, 2),
        }
    return figures


def _fill(connection: psycopg.Connection[tuple[object, ...]], filled: int, messages: int) -> int:
    """Store so many more messages; says how many there have been."""
    with connection.transaction():
        connection.execute(_FILL, {"first": filled + 1, "last": filled + messages})
        connection.execute(_STORED, (filled + messages,))
    return filled + messages


class _Board:
    """What the claimers of one run share."""

    def __init__(self, claimers: int, messages: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ready = context.Barrier(claimers + 1)
        self.until = context.Value("d", 0.0)
        self.ended = context.Value("d", 0.0)
        self.cpu_s = context.Value("d", 0.0)
        self.done = context.Value("q", 0)
        self.messages = messages


def _drained(dsn: str, claimers: int, *, seconds: float, messages: int) -> Drained:
    """Until so many messages are done, or for so long."""
    board = _Board(claimers, messages)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_claim, args=(dsn, board)) for _ in range(claimers)]
    for process in processes:
        process.start()
    board.ready.wait(60)
    started = time.monotonic()
    board.until.value = started + seconds
    board.ready.wait(60)
    for process in processes:
        process.join()
    done = max(1, int(board.done.value))
    return Drained(done / (board.ended.value - started), board.cpu_s.value / done * 1e6)


def _claim(dsn: str, board: _Board) -> None:
    """Receive and acknowledge until stopped; returns what it cost."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT 1")
        backend = psutil.Process(connection.info.backend_pid)
        board.ready.wait(60)
        board.ready.wait(60)
        before = _cpu_s(backend)
        while time.monotonic() < board.until.value and board.done.value < board.messages:
            rows = connection.execute(_RECEIVE, (_BATCH,)).fetchall()
            if not rows:
                continue
            row = connection.execute(_ACK, ([ack_id for ack_id, _ in rows],)).fetchone()
            assert row is not None
            with board.done.get_lock():
                board.done.value += int(str(row[0]))
                board.ended.value = time.monotonic()
        with board.cpu_s.get_lock():
            board.cpu_s.value += _cpu_s(backend) - before


def _cpu_s(backend: psutil.Process) -> float:
    """Of this process and of its backend."""
    times = backend.cpu_times()
    return time.process_time() + float(times.user) + float(times.system)
