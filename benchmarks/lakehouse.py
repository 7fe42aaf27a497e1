"""Tables of a lake: how fast the service catches up into them, and how fresh they are at a rate.

``append`` and ``upsert`` catch up as in ``pipeline``: on new rows, and on changes of rows that are
there, as Delta tables and as Iceberg tables. Freshness is the time from a change's commit at the
source to the commit of the Delta version that has it, with the delay that a sink has where nothing
is said.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq

from benchmarks import lakehouse_merge
from benchmarks.catch_up import (
    BenchmarkTarget,
    CaughtUp,
    catch_up,
    make_warm,
    require_whole,
    roles,
    service_of,
    wait_arrived,
    wait_delivering,
)
from benchmarks.pgbench import CONNECTIONS, writing
from benchmarks.processes import Figures, ProcessMeter, cpu_s
from benchmarks.service import OWN_ROLES, RunningService
from benchmarks.sizes import Sizes, progress
from benchmarks.source import ONE_ROW, BenchmarkSource, WrittenRows, open_source
from cdc.config import DeltaDestination
from cdc.errors import ProtocolError
from sinks.lakehouse.iceberg import Catalogs, iceberg_tables
from sinks.lakehouse.maintenance import merge_small_files
from sinks.lakehouse.names import LakeTarget
from tests.lake import query, query_iceberg

_KEYS = 200_000  # what a service is warm after, so that there are as many rows to change
_PASS = "UPDATE orders SET quantity = quantity + 1, status = 'seen' WHERE id BETWEEN {} AND {}"
_COUNT = "SELECT count(*) FROM t"
_METADATA = "SELECT metadata_location FROM walbrook.iceberg_tables WHERE metadata_location LIKE %s"
_ORDERS = LakeTarget("public", "orders")
_FILE_BYTES = 1 << 30
_DELAY_MS = 1_000  # while catching up, so that the last few rows are not waited for
_TIMEOUT_S = 900.0
_GRACE_S = 60.0


@dataclass(frozen=True)
class _Version:
    """A version of a table: when it was committed, and the files it added."""

    committed_s: float
    files: tuple[Path, ...]


def run(sizes: Sizes) -> dict[str, object]:
    """Rows appended, changes merged, and how fresh a history is."""
    with (
        tempfile.TemporaryDirectory(prefix="walbrook-lakehouse-") as name,
        open_source(Path(name) / "postgres") as source,
    ):
        directory = Path(name)
        appended = _append(directory, source, sizes)
        fresh = _freshness(directory, source, sizes)
        merged = _upsert(directory, source, sizes)
        iceberg = _iceberg(directory, source, sizes)
        parquet = _parquet(directory, source, sizes)
    return {
        "rows": sizes.rows,
        "rows_per_s_delta_append": round(appended.rows_per_s),
        **_costs("append", appended),
        "changes_per_s_delta_upsert": round(merged.rows_per_s),
        **_costs("upsert", merged),
        "upsert_keys": min(_KEYS, sizes.rows),
        **fresh,
        **iceberg,
        **parquet,
        **lakehouse_merge.run(),
        "processes": {"append": appended.processes, "upsert": merged.processes},
    }


def _iceberg(directory: Path, source: BenchmarkSource, sizes: Sizes) -> dict[str, object]:
    """The same for Iceberg tables, whose catalog is in the source's own database."""
    source.run("TRUNCATE orders")
    appended = _append(directory, source, sizes, "iceberg")
    merged = _upsert(directory, source, sizes, "iceberg")
    return {
        "rows_per_s_iceberg_append": round(appended.rows_per_s),
        **_costs("iceberg_append", appended),
        "changes_per_s_iceberg_upsert": round(merged.rows_per_s),
        **_costs("iceberg_upsert", merged),
    }


def _parquet(directory: Path, source: BenchmarkSource, sizes: Sizes) -> dict[str, object]:
    """Typed Parquet files: rows appended, and files at the rate and at a twentieth of it."""
    source.run("TRUNCATE orders")
    appended = _append(directory, source, sizes, "parquet")
    found: dict[str, object] = {
        "rows_per_s_parquet_append": round(appended.rows_per_s),
        **_costs("parquet_append", appended),
    }
    for rate in (sizes.rate, max(1, sizes.rate // 20)):
        figures = _freshness(directory, source, replace(sizes, rate=rate), "parquet")
        found |= {f"parquet_{name}_at_{rate}": value for name, value in figures.items()}
    return found


def _costs(name: str, measured: CaughtUp) -> dict[str, object]:
    own = [figures for role, figures in measured.processes.items() if role in OWN_ROLES]
    used_us = cpu_s(measured.processes, OWN_ROLES) * 1e6 / measured.load.rows
    return {
        f"{name}_cpu_us_per_row": round(used_us, 2),
        f"{name}_peak_rss_mb": round(sum(each["peak_rss_mb"] for each in own), 1),
    }


def _target(
    directory: Path, source: BenchmarkSource, name: str, form: str = "delta", **more: object
) -> BenchmarkTarget:
    sink = {"type": form, "path": str(directory / name), **more}

    def held() -> list[int]:
        if form == "iceberg":
            return [_held_by_iceberg(source, directory / name, name)]
        if form == "parquet":
            manifest = _manifest(directory / name)
            return [sum(file["rows"] for file in manifest["files"])]
        ((rows,),) = query(_COUNT, t=directory / name / "public" / "orders")
        return [int(str(rows))]

    return BenchmarkTarget(name, {name: sink}, lambda: source.delivered(name), held, is_fed=False)


def _held_by_iceberg(source: BenchmarkSource, folder: Path, name: str) -> int:
    """Behind maintenance: the engine that counts is slow with a million deletes."""
    catalogs = Catalogs(name, {"type": "sql"}, str(folder), {}, state_dsn=source.postgres.dsn)
    table = iceberg_tables(catalogs.open, str(folder), f"{name}/{name}")(_ORDERS)
    while merge_small_files(table, _FILE_BYTES):
        pass
    ((rows,),) = query_iceberg(_COUNT, t=_metadata_in(source, folder))
    return int(str(rows))


def _metadata_in(source: BenchmarkSource, folder: Path) -> str:
    """Where the catalog says that the metadata of the table is."""
    found = source.connection.execute(_METADATA, (f"%{folder}/public/orders/%",)).fetchone()
    assert found is not None
    return str(found[0])


def _append(
    directory: Path, source: BenchmarkSource, sizes: Sizes, form: str = "delta"
) -> CaughtUp:
    target = _target(directory, source, f"{form}_append", form, max_delay_ms=_DELAY_MS)
    with service_of(directory, source, target) as service:
        make_warm(source, service, target, sizes)
        measured = catch_up(source, service, target, sizes)
        progress(f"lakehouse, {target.name}: {measured.rows_per_s:,.0f} rows/s")
    require_whole(target, measured)
    source.drop_slot(service.slot)
    return measured


def _upsert(
    directory: Path, source: BenchmarkSource, sizes: Sizes, form: str = "delta"
) -> CaughtUp:
    name = f"{form}_upsert"
    target = _target(directory, source, name, form, mode="upsert", max_delay_ms=_DELAY_MS)
    source.run("TRUNCATE orders")
    with service_of(directory, source, target) as service:
        make_warm(source, service, target, sizes)
        measured = _changed(source, service, target, sizes)
        progress(f"lakehouse, {target.name}: {measured.rows_per_s:,.0f} changes/s")
    here = source.count("orders")
    if target.held() != [here]:
        raise ProtocolError(f"the merged table has {target.held()} rows and the source {here}")
    source.drop_slot(service.slot)
    return measured


def _changed(
    source: BenchmarkSource, service: RunningService, target: BenchmarkTarget, sizes: Sizes
) -> CaughtUp:
    """Rows that are there are changed while the reader is suspended."""
    keys = source.connection.execute("SELECT min(id), max(id) FROM orders").fetchone()
    assert keys is not None
    first, highest = (int(str(number)) for number in keys)
    reader = service.reader()
    reader.suspend()
    began, changed = time.perf_counter(), 0
    try:
        while changed < sizes.rows:
            for start in range(first, highest + 1, sizes.transaction_rows):
                last = start + sizes.transaction_rows - 1
                changed += source.connection.execute(_PASS.format(start, last).encode()).rowcount
        source.written += changed + 1
        load = source.ended(changed, ONE_ROW, "benchmark")
        load_s = time.perf_counter() - began
    finally:
        reader.resume()
    return _measured(service, target, load, load_s)


def _measured(
    service: RunningService, target: BenchmarkTarget, load: WrittenRows, load_s: float
) -> CaughtUp:
    began, expected = time.perf_counter(), service.expected
    with ProcessMeter(lambda: roles(service, target)) as meter:
        ended = service.until(
            f"{expected - 1} changes in {target.name}",
            lambda: target.arrived() >= expected - 1,
            _TIMEOUT_S,
        )
    return CaughtUp(load, load_s, ended - began, expected, meter.figures())


def _freshness(
    directory: Path, source: BenchmarkSource, sizes: Sizes, form: str = "delta"
) -> dict[str, object]:
    name = f"fresh_{form}_{sizes.rate}"
    target = _target(directory, source, name, form)
    script = directory / "fresh.sql"
    script.write_text(ONE_ROW)
    each = max(1, sizes.rate * sizes.seconds // CONNECTIONS)
    with service_of(directory, source, target) as service:
        wait_delivering(source, service, target)
        wait_arrived(service, target)
        progress(f"lakehouse, freshness: {sizes.rate} changes/s for {sizes.seconds} s")
        since_s = time.time()
        source.written += each * CONNECTIONS
        with (
            ProcessMeter(lambda: roles(service, target)) as meter,
            writing(source, script, sizes.rate, f"--transactions={each}") as writer,
        ):
            writer.wait(sizes.seconds + _GRACE_S)
            until_s = time.time()
            wait_arrived(service, target)
    source.drop_slot(service.slot)
    place = directory / name
    found = _written(place) if form == "parquet" else _versions(place / "public" / "orders")
    versions = [each for each in found if each.committed_s >= since_s]
    return _fresh_figures(versions, until_s - since_s, meter.figures(), each * CONNECTIONS)


def _fresh_figures(
    versions: list[_Version], seconds: float, processes: Figures, changes: int
) -> dict[str, object]:
    delays_ms = []
    for version in versions:
        for file in version.files:
            times = pq.read_table(file, columns=["walbrook_committed_at"], partitioning=None)
            committed = times.column(0).to_numpy().astype("datetime64[us]").astype(np.int64) / 1e6
            delays_ms.append((version.committed_s - committed) * 1000)
    delays = np.concatenate(delays_ms)
    files = [file.stat().st_size for version in versions for file in version.files]
    own = [figures for role, figures in processes.items() if role in OWN_ROLES]
    return {
        "freshness_changes": len(delays),
        "freshness_max_delay_ms": DeltaDestination(path=Path("x")).max_delay_ms,
        "freshness_p50_ms": round(float(np.percentile(delays, 50))),
        "freshness_p99_ms": round(float(np.percentile(delays, 99))),
        "files_per_hour": round(len(files) * 3600 / seconds),
        "file_median_bytes": round(median(files)),
        "freshness_cpu_us_per_change": round(cpu_s(processes, OWN_ROLES) * 1e6 / changes),
        "freshness_peak_rss_mb": round(sum(each["peak_rss_mb"] for each in own), 1),
    }


def _manifest(lake: Path) -> Any:
    return orjson.loads((lake / "public" / "orders" / "_manifest.json").read_bytes())


def _written(lake: Path) -> Iterator[_Version]:
    """The files of a manifest, each by when it was written, which is just before its commit."""
    for file in _manifest(lake)["files"]:
        path = lake / "public" / "orders" / file["path"]
        yield _Version(path.stat().st_mtime, (path,))


def _versions(place: Path) -> Iterator[_Version]:
    """The versions of a table that added files, as its log says."""
    for entry in sorted((place / "_delta_log").glob("*.json")):
        actions = [orjson.loads(line) for line in entry.read_bytes().splitlines()]
        files = tuple(place / each["add"]["path"] for each in actions if "add" in each)
        times = [each["commitInfo"]["timestamp"] for each in actions if "commitInfo" in each]
        if files and times:
            yield _Version(times[0] / 1000, files)
