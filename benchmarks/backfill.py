"""How fast existing rows arrive in Redis, Parquet and Postgres, and how live changes fare.

The yardstick is ``COPY (SELECT …) TO STDOUT`` of the same rows, with as many connections at once,
in the same run: what any client could read. The service is warm: it has delivered the rows of a
smaller table in the same way, in chunks over as many connections. Postgres as a destination is a
server of its own. While each backfill runs, a row is inserted again and again, and the
time until it is settled is taken, as it is before the backfill. Last, the rows go into Parquet once
more over 1 and over 4 connections.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
from psycopg import sql

from benchmarks.catch_up import (
    BenchmarkTarget,
    parquet_target,
    postgres_target,
    redis_target,
    service_of,
    wait_delivering,
)
from benchmarks.service import RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.source import ONE_ROW, PUBLICATION, BenchmarkSource, open_source
from cdc.errors import OperatorError

_CONNECTIONS, _OTHER_CONNECTIONS = 2, (1, 4)
_WARM_ROWS = 100_000
_CHUNK_BYTES, _WARM_CHUNK_BYTES = 32 << 20, 4 << 20
_TIMEOUT_S = 1800.0
_LIVE_S = 5.0
_LIVE_EVERY_S = 0.05
_START = "SELECT id FROM walbrook.start_backfill(%s, %s, chunk_bytes => %s, connections => %s)"
_WARM = f"""
CREATE TABLE warm (LIKE orders INCLUDING ALL);
INSERT INTO warm SELECT * FROM new_orders(1, {_WARM_ROWS});
ALTER PUBLICATION {PUBLICATION} ADD TABLE warm
"""  # noqa: S608
_COPY = "COPY (SELECT * FROM orders WHERE ctid >= {} AND ctid < {}) TO STDOUT"
_STATE = "SELECT state FROM walbrook.backfills WHERE id = %s"
_PASSED = """
SELECT cursor_lsn >= %s::pg_lsn FROM walbrook.consumers WHERE source = %s
"""
_OPEN = ("waiting", "running")


def run(sizes: Sizes) -> dict[str, object]:
    """All targets, one after the other, over the same rows."""
    figures: dict[str, object] = {}
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-backfill-") as name,
        open_source(Path(name) / "postgres") as source,
    ):
        directory = Path(name)
        source.load(sizes.rows, sizes.rows)
        source.run(_WARM)
        source.run("VACUUM ANALYZE orders")
        source.checkpoint()
        rates: dict[str, float] = {}
        for one in (1, 2, 4):
            rates[f"copy_{one}"] = _copy(source, one, sizes.rows)
            progress(f"backfill: COPY over {one} connections {rates[f'copy_{one}']:,.0f} rows/s")
        with redis_target(directory) as target:
            figures |= _measured(directory, source, target, sizes.rows, rates["copy_2"])
        target = parquet_target(directory, source, "parquet")
        figures |= _measured(directory, source, target, sizes.rows, rates["copy_2"])
        with postgres_target(directory, source, "postgres") as target:
            figures |= _measured(directory, source, target, sizes.rows, rates["copy_2"])
    copied = {f"{name}_rows_per_s": round(rate) for name, rate in rates.items()}
    return {"rows": sizes.rows, "connections": _CONNECTIONS, **copied, **figures}


def _copy(source: BenchmarkSource, connections: int, rows: int) -> float:
    """Rows per second of COPY over so many connections, each with its share of the blocks."""
    with psycopg.connect(source.postgres.dsn) as connection:
        row = connection.execute("SELECT pg_relation_size('orders') / 8192").fetchone()
    assert row is not None
    step = -(-int(row[0]) // connections)

    def drain(at: int) -> None:
        blocks = (f"({at * step},0)", f"({(at + 1) * step},0)")
        query = sql.SQL(_COPY).format(*blocks)
        with (
            psycopg.connect(source.postgres.dsn) as connection,
            connection.cursor().copy(query) as copy,
        ):
            for _ in copy:
                pass

    began = time.perf_counter()
    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(drain, range(connections)))
    return rows / (time.perf_counter() - began)


def _measured(
    directory: Path, source: BenchmarkSource, target: BenchmarkTarget, rows: int, copied: float
) -> dict[str, object]:
    name, (sink,) = target.name, target.sinks
    with service_of(directory, source, target) as service:
        wait_delivering(source, service, target)
        _backfilled(source, service, sink, "warm", _CONNECTIONS)
        alone = _latency(source, service, _for_a_while())
        began = time.perf_counter()
        backfill = _started(source, sink, "orders", _CONNECTIONS)
        beside = _latency(source, service, lambda: _asked(source, _STATE, backfill) not in _OPEN)
        took_s = time.perf_counter() - began
        if (state := _asked(source, _STATE, backfill)) != "done":
            raise OperatorError(f"the backfill into {name} is {state}")
        others = {
            f"rows_per_s_{name}_over_{one}": round(
                rows / _backfilled(source, service, sink, "orders", one)
            )
            for one in (_OTHER_CONNECTIONS if name == "parquet" else ())
        }
        warnings = service.warnings()
    source.drop_slot(service.slot)
    rate = rows / took_s
    progress(f"backfill: {name} {rate:,.0f} rows/s; live p99 {alone:.0f} ms, then {beside:.0f} ms")
    return {
        f"rows_per_s_{name}": round(rate),
        f"backfill_ratio_{name}": round(rate / copied, 3),
        f"live_p99_ms_{name}": round(alone),
        f"live_p99_ms_beside_{name}": round(beside),
        f"warnings_{name}": warnings,
        **others,
    }


def _started(source: BenchmarkSource, sink: str, table: str, connections: int) -> object:
    chunk_bytes = _WARM_CHUNK_BYTES if table == "warm" else _CHUNK_BYTES
    return _asked(source, _START, sink, table, chunk_bytes, connections)


def _backfilled(
    source: BenchmarkSource, service: RunningService, sink: str, table: str, connections: int
) -> float:
    """How many seconds a backfill took that had no changes beside it."""
    began = time.perf_counter()
    backfill = _started(source, sink, table, connections)
    ended = service.until(
        f"the rows of {table}",
        lambda: _asked(source, _STATE, backfill) not in _OPEN,
        _TIMEOUT_S,
    )
    return ended - began


def _for_a_while() -> Callable[[], bool]:
    until = time.monotonic() + _LIVE_S
    return lambda: time.monotonic() > until


def _latency(source: BenchmarkSource, service: RunningService, over: Callable[[], bool]) -> float:
    """The p99, in ms, from the commit of a row to the settled cursor behind it, until ``over``."""
    taken: list[float] = []
    while not taken or not over():
        with source.connection.transaction():
            source.run(ONE_ROW)
            # The commit comes behind it, and writes of others do not.
            lsn = _asked(source, "SELECT pg_current_wal_insert_lsn()::text")
        committed = time.perf_counter()
        settled = service.until(
            "a change to be settled",
            lambda: bool(_asked(source, _PASSED, lsn, service.name)),  # noqa: B023
            _TIMEOUT_S,
        )
        taken.append((settled - committed) * 1000)
        time.sleep(_LIVE_EVERY_S)
    return sorted(taken)[int(len(taken) * 0.99)]


def _asked(source: BenchmarkSource, query: str, *parameters: object) -> object:
    row = source.connection.execute(query.encode(), parameters).fetchone()
    return None if row is None else row[0]
