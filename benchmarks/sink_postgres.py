"""How many changes per second the postgres sink applies, beside psycopg's own COPY loop.

The same recorded changes, in the same batches and with one commit each, go to tables with the same
columns on one server: by the sink, and by a bare loop that has the text of each COPY ready before
the clock runs and keeps no position. Rounds of both alternate, each into empty tables.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import psutil
import psycopg

from benchmarks.recordings import RecordedLoad, loads, read_recording, record
from benchmarks.sizes import progress
from cdc.change import MessageBatch
from cdc.decoding import decode_changes
from cdc.decoding.columns import bytes_of
from cdc.decoding.copy_text import lsn_texts
from cdc.decoding.format import ROW_TEXT, TEXTS, Wanted
from cdc.decoding.joins import joined
from cdc.decoding.shapes import Context, shape_for
from demo.embedded_postgres import EmbeddedPostgres
from sinks.postgres import PostgresSink
from sinks.postgres.history import commit_times
from sinks.postgres.tables import OWN_COLUMNS

_BATCH_ROWS = 10_000
_ORDERS = (
    "id bigint PRIMARY KEY, customer_id bigint, status text, amount numeric(12,2), paid boolean, "
    "created_at timestamptz, document jsonb, note text"
)
_OWN = ", ".join(f"{name} {kind}" for name, kind in OWN_COLUMNS)
_BARE = f"""
SET synchronous_commit = on;
DROP TABLE IF EXISTS bare_append, bare_upsert;
CREATE TABLE bare_append ({_OWN}, {_ORDERS.replace(" PRIMARY KEY", "")});
CREATE TABLE bare_upsert ({_ORDERS});
CREATE TEMPORARY TABLE bare_stage (LIKE bare_upsert) ON COMMIT DELETE ROWS;
"""
_UPSERT = """
INSERT INTO bare_upsert SELECT * FROM bare_stage ON CONFLICT (id) DO UPDATE
   SET customer_id = excluded.customer_id, status = excluded.status, amount = excluded.amount,
       paid = excluded.paid, created_at = excluded.created_at, document = excluded.document,
       note = excluded.note
"""
_BACKEND = "SELECT pid FROM pg_stat_activity WHERE application_name = %s"
_CLEAR = "DROP SCHEMA IF EXISTS sink, walbrook_sink CASCADE"

Figures = dict[str, object]


def run(rows: int = 200_000, rounds: int = 3) -> Figures:
    """Messages per second, CPU per change and the ratios of the modes; medians of the rounds."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-sink-") as directory,
        EmbeddedPostgres(Path(directory) / "postgres", fast=True) as server,
    ):
        progress("recording")
        batches = _batches(server.dsn, Path(directory) / "orders.arrow", rows)
        return _measured(server.dsn, batches, rounds)


def _batches(dsn: str, path: Path, rows: int) -> list[MessageBatch]:
    orders = loads()["orders"]
    record(
        dsn, RecordedLoad(orders.table, orders.create, orders.before, orders.recorded, rows), path
    )
    frames, schemas = read_recording(path)
    shape = shape_for("sequin", Context("bench", "bench", "h", "d", now_ns=0))
    found = []
    for frame in frames:
        changes = decode_changes(frame, schemas, wanted=Wanted(texts=True))
        shaped = shape.rows(changes)
        for name in TEXTS:
            shaped = shaped.append_column(name, changes.column(name))
        found += list(MessageBatch(shaped, shape).slices(_BATCH_ROWS))
    return found


def _measured(dsn: str, batches: Sequence[MessageBatch], rounds: int) -> Figures:
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "bare_append": lambda: _bare(dsn, "append", batches),
        "append": lambda: _by_sink(dsn, "append", batches),
        "bare_upsert": lambda: _bare(dsn, "upsert", batches),
        "mirror": lambda: _by_sink(dsn, "mirror", batches),
        "events": lambda: _by_sink(dsn, "events", batches),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            taken[name].append(way())
            progress(f"round {number + 1}: {name} {taken[name][-1][0]:.2f} s")
    changes = sum(map(len, batches))
    rate = {name: changes / median(s for s, _ in times) for name, times in taken.items()}
    cpu = {name: median(c for _, c in times) / changes * 1e6 for name, times in taken.items()}
    return {
        "sink_ratio_postgres": round(rate["append"] / rate["bare_append"], 3),
        "sink_ratio_postgres_upsert": round(rate["mirror"] / rate["bare_upsert"], 3),
        **{f"messages_per_s_postgres_{name}": round(each) for name, each in rate.items()},
        **{f"cpu_us_per_change_postgres_{name}": round(each, 2) for name, each in cpu.items()},
    }


def _by_sink(dsn: str, mode: str, batches: Sequence[MessageBatch]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process and of the server's process for it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_CLEAR)
        sink = PostgresSink(
            dsn,
            source="bench",
            consumer="bench",
            mode=mode,  # type: ignore[arg-type]
            target_schema="sink",
        )
        began, cpu = time.monotonic(), time.process_time()
        for batch in batches:
            delivery = sink.deliver(batch)
            if delivery.error is not None:
                raise delivery.error
        taken, used = time.monotonic() - began, time.process_time() - cpu
        row = connection.execute(_BACKEND, ("walbrook:bench",)).fetchone()
        assert row is not None
        used += _cpu_s(row[0])
        sink.close()
    return taken, used


def _bare(dsn: str, way: str, batches: Sequence[MessageBatch]) -> tuple[float, float]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_BARE)
        texts = [_text(batch, way) for batch in batches]
        table = "bare_append" if way == "append" else "bare_stage"
        before = _cpu_s(connection.info.backend_pid)
        began, cpu = time.monotonic(), time.process_time()
        for text in texts:
            with connection.transaction():
                with connection.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
                    copy.write(text)
                if way == "upsert":
                    connection.execute(_UPSERT)
        taken, used = time.monotonic() - began, time.process_time() - cpu
        return taken, used + _cpu_s(connection.info.backend_pid) - before


def _text(batch: MessageBatch, way: str) -> bytes:
    rows = batch.rows
    if way == "upsert":
        return bytes_of(joined(rows.column(ROW_TEXT), "\n")).tobytes()
    lines = joined(
        "1\t", rows.column("action"), "\t", lsn_texts(rows.column("commit_lsn")), "\t",
        rows.column("commit_idx").cast("string"), "\t", commit_times(rows),
        "\t\\N\t\\N\t", rows.column(ROW_TEXT), "\n",
    )  # fmt: skip
    return bytes_of(lines).tobytes()


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
