"""A real Prometheus scrapes a running service, with the rules and the alerts of ``examples``."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest
import redis

from tests.fix_postgres import Database
from tests.prometheus_server import program, scraping
from tests.unit.metrics.test_examples import ALERTS, RULES, expressions, rules
from tests.waiting import until
from tests.walbrook_service import running

pytestmark = pytest.mark.sinks

_HISTOGRAM = ("_bucket", "_sum", "_count")


def names_of(exposition: str) -> set[str]:
    """All names that series of these families have, with or without series now."""
    found: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", exposition, re.MULTILINE):
        found |= {name + part for part in _HISTOGRAM} if kind == "histogram" else {name}
    return found


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    check = subprocess.run(
        [program("promtool"), "check", "rules", RULES, ALERTS], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_a_service_gives_all_metrics_that_rules_alerts_and_dashboard_name(
    database: Database, redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY); CREATE TABLE other (id int)")
    database.execute("ALTER TABLE other REPLICA IDENTITY FULL")
    sinks: list[dict[str, object]] = [
        {
            "name": "items",
            "source": {"include_tables": ["public.item"]},
            "destination": {"type": "redis_stream", "url": redis_url, "stream_key": "items"},
        },
        {
            "name": "jobs",
            "source": {"include_tables": ["public.item"]},
            "destination": {"type": "pull"},
        },
    ]
    with running(database, tmp_path / "service", sinks) as service:
        target = f"127.0.0.1:{service.http_port()}"
        database.execute("INSERT INTO item VALUES (0)")
        service.until_settled()
        with scraping(target, [RULES, ALERTS], tmp_path / "prometheus") as prometheus:
            database.execute("INSERT INTO item SELECT generate_series(1, 500)")
            database.execute("INSERT INTO other SELECT generate_series(1, 300)")
            service.until_settled()
            assert redis_client.xlen("items") == 501

            def counted(metric: str, **labels: str) -> float:
                chosen = ",".join(f'{key}="{value}"' for key, value in labels.items())
                return sum(prometheus.query(f"{metric}{{{chosen}}}").values())

            def is_shown() -> bool:
                return counted("walbrook_delivered_messages_total", consumer="items") >= 501

            until("the deliveries to be scraped", is_shown)
            assert counted("walbrook_matched_messages_total", consumer="items") == 501
            # With the rows of the other table go the test's own marks, which are logical messages.
            assert 300 <= counted("walbrook_filtered_messages_total", consumer="items") <= 303
            assert counted("walbrook_delivery_failures_total", consumer="items") == 0
            assert counted("walbrook_end_to_end_seconds_count", consumer="items") == (
                pytest.approx(501)
            )
            assert counted("walbrook_ingested_messages_total", source="shop") >= 801
            assert counted("walbrook_ingest_seconds_count") == (
                counted("walbrook_ingested_messages_total")
            )
            assert counted("walbrook_log_sync_seconds_count") > 0
            assert counted("walbrook_delivered_bytes_total", consumer="items") > 501 * 4
            assert counted("walbrook_consumer_queue_depth", consumer="jobs") >= 501
            assert counted("walbrook_slot_wal_status", status="reserved") == 1
            for process in ("supervisor", "reader shop", "driver", "driver jvm"):
                assert counted("walbrook_process_resident_bytes", process=process) > 1 << 20
                assert counted("walbrook_process_cpu_seconds_total", process=process) > 0
            busy = prometheus.query("walbrook_busy_ratio")
            stages = {dict(labels)["stage"] for labels in busy}
            assert stages == {"reader", "feed", "worker", "settler"}
            assert all(0 <= ratio <= 1 for ratio in busy.values())

            there = names_of(httpx.get(f"http://{target}/metrics").text)
            named = {name for text in expressions() for name in re.findall(r"\bwalbrook_\w+", text)}
            assert named <= there, f"not in /metrics: {sorted(named - there)}"

            def evaluated() -> bool:
                return all(rule["health"] == "ok" for rule in prometheus.rules())

            until("all rules to be evaluated", evaluated)
            assert len(prometheus.rules()) == len([*rules(RULES), *rules(ALERTS)])

            def renamed() -> bool:
                sequin = counted("sequin_message_deliver_success_count", consumer="items")
                return sequin > 0 and counted("debezium_metrics_TotalNumberOfEventsSeen") >= 801

            until("the names of others", renamed)
            assert counted("debezium_metrics_Connected", name="shop") == 1
            assert counted("sequin_entity_health", status="healthy", consumer="items") == 1
            firing = prometheus.query('ALERTS{alertstate="firing"}')
            assert not firing, f"alerts of a service that is well: {firing}"
