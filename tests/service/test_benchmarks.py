"""Every benchmark of the service runs at a tiny size and reports what its page promises.

The figures themselves mean nothing here. Those that start more than one service take minutes
together, and run with ``make chaos``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import (
    backfill,
    eventtime,
    idle,
    lakehouse,
    latency,
    live_config,
    pipeline,
    read,
    sink_postgres,
    sinks,
    start,
    webhook,
)
from benchmarks.sizes import Sizes

Run = Callable[[Sizes], dict[str, object]]


def _percentiles(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in ("p50_ms", "p99_ms", "changes"))


@pytest.mark.parametrize(
    ("run", "sizes", "fields"),
    [
        pytest.param(
            latency.run,
            Sizes(rate=100, seconds=1),
            (
                *_percentiles(""),
                *_percentiles("rate_10_"),
                *_percentiles("rate_10000_"),
                *_percentiles("event_time_"),
                "cpu_us_per_change",
            ),
            id="latency",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            live_config.run,
            Sizes(rate=100, seconds=8),
            ("applies", "quiet_p99_ms", "changing_p99_ms", "p99_ratio"),
            id="live_config",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            pipeline.run,
            Sizes(rows=2_000, transaction_rows=100),
            (
                "slot_rows_per_s",
                "pipeline_ratio_redis",
                "pipeline_ratio_kafka",
                "pipeline_ratio_parquet",
            ),
            id="pipeline",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            sinks.run,
            Sizes(rows=2_000, rounds=1, rate=100, seconds=1),
            (
                "sink_ratio_kafka",
                "sink_ratio_kafka_exactly_once",
                "sink_ratio_redis_stream",
                "kafka_cpu_us_per_message",
                "latency_p50_ms_kafka",
                "latency_p50_ms_kafka_exactly_once",
                "latency_p50_ms_redis_stream",
            ),
            id="sinks",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            read.run,
            Sizes(rows=2_000, transaction_rows=100, rounds=1),
            ("read_ratio", "slot_ratio", "slot_ratio_ten_tables", "slot_rows_per_s_ten_tables"),
            id="read",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            lambda sizes: sink_postgres.run(sizes.rows, sizes.rounds),
            Sizes(rows=2_000, rounds=1),
            (
                "sink_ratio_postgres",
                "sink_ratio_postgres_upsert",
                "messages_per_s_postgres_append",
                "messages_per_s_postgres_mirror",
                "messages_per_s_postgres_events",
                "cpu_us_per_change_postgres_append",
            ),
            id="sink_postgres",
            marks=pytest.mark.sinks,
        ),
        pytest.param(
            eventtime.catch_up_figures,
            Sizes(rows=2_000, transaction_rows=100),
            ("catch_up_rows_per_s", "catch_up_cpu_us_per_row"),
            id="eventtime",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            lakehouse.run,
            Sizes(rows=2_000, transaction_rows=100, rate=100, seconds=1),
            (
                "rows_per_s_delta_append",
                "changes_per_s_delta_upsert",
                "rows_per_s_iceberg_append",
                "changes_per_s_iceberg_upsert",
                "rows_per_s_parquet_append",
                "freshness_p50_ms",
                "freshness_p99_ms",
                "files_per_hour",
                "file_median_bytes",
                "append_peak_rss_mb",
            ),
            id="lakehouse",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            webhook.run,
            Sizes(seconds=1),
            ("webhook_ratio", "messages_per_s_default_0_ms", "messages_per_s_batch_1_50_ms"),
            id="webhook",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            start.run,
            Sizes(rounds=1),
            ("first_change_s", "restart_first_change_s"),
            id="start",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            backfill.run,
            Sizes(rows=2_000),
            ("backfill_ratio_redis", "backfill_ratio_parquet", "live_p99_ms_beside_parquet"),
            id="backfill",
            marks=pytest.mark.chaos,
        ),
        pytest.param(
            idle.run, Sizes(seconds=1), ("idle_pss_mb",), id="idle", marks=pytest.mark.chaos
        ),
    ],
)
def test_a_benchmark_reports_its_figures(run: Run, sizes: Sizes, fields: tuple[str, ...]) -> None:
    figures = run(sizes)
    for field in fields:
        figure = figures[field]
        assert isinstance(figure, int | float), field
        assert figure > 0, field
