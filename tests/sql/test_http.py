"""``/health`` and ``/metrics`` over a state database with something to tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cdc.config import Http
from cdc.service.http.server import HealthReader, HttpServer
from cdc.state.health import Condition, report_conditions
from cdc.state.migrate import migrate
from cdc.state.pressure import PressureStatus, show_pressure
from tests.fix_postgres import Database

pytestmark = pytest.mark.migrated

_SOURCE = """
INSERT INTO walbrook.sources
       (name, slot, publication, system_identifier, restart_lsn, term, state, log_bytes,
        slot_safe_bytes, heartbeat_at)
VALUES ('shop', 's', 'p', '1', '0/64', 1, 'streaming', 4096, 1000,
        clock_timestamp() - interval '5 seconds')
"""


class OneProcess:
    def processes(self) -> dict[str, bool]:
        return {"reader shop": True}

    def starting(self) -> list[str]:
        return []

    def silent_s(self) -> float:
        return 0.0


@pytest.fixture
def client(database: Database) -> Iterator[httpx.Client]:
    with database.connect() as connection:
        migrate(connection)
        connection.execute(_SOURCE)
    with (
        HttpServer(Http(port=0), database.dsn, OneProcess()) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as ours,
    ):
        yield ours


def tell(database: Database, *conditions: Condition) -> None:
    with database.connect() as connection:
        report_conditions(connection, "shop", 1, conditions)


class StartingDriver(OneProcess):
    def __init__(self) -> None:
        self.waits_for = ["driver"]

    def starting(self) -> list[str]:
        return self.waits_for


def test_a_service_whose_driver_is_not_up_is_starting_and_not_well(
    client: httpx.Client, database: Database
) -> None:
    processes = StartingDriver()
    with HttpServer(Http(port=0), database.dsn, processes) as server:
        url = f"http://127.0.0.1:{server.port}/health"
        answer = httpx.get(url)
        assert (answer.status_code, answer.json()["status"]) == (503, "starting")
        assert answer.json()["complaints"] == ["driver is starting"]
        tell(database, Condition("slot_lost", "error", "the slot is lost", "create it"))
        assert httpx.get(url).json()["status"] == "degraded", "what is wrong counts more"
        tell(database)
        processes.waits_for = []
        answer = httpx.get(url)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_a_warning_is_listed_and_leaves_the_service_well(
    client: httpx.Client, database: Database
) -> None:
    assert client.get("/health").json()["warnings"] == []
    tell(database, Condition("slot_at_risk", "warning", "the slot is at risk", "give it room"))
    answer = client.get("/health")
    assert answer.status_code == 200
    body = answer.json()
    assert body["status"] == "ok"
    assert body["warnings"] == ["shop: the slot is at risk"]
    assert body["complaints"] == []
    (event,) = body["events"]
    assert (event["kind"], event["fix"]) == ("slot_at_risk", "give it room")


def test_an_error_is_a_complaint_until_it_is_resolved(
    client: httpx.Client, database: Database
) -> None:
    tell(database, Condition("slot_lost", "error", "the slot is lost", "create it"))
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["complaints"] == ["shop: the slot is lost"]
    tell(database)
    assert client.get("/health").status_code == 200


def test_a_reader_that_reports_nothing_is_a_complaint_and_does_not_stream(
    client: httpx.Client, database: Database
) -> None:
    database.execute("UPDATE walbrook.sources SET seen_at = now(), current_at = now()")
    assert client.get("/health").status_code == 200
    assert 'walbrook_source_streaming{source="shop"} 1.0' in client.get("/metrics").text
    old = "clock_timestamp() - interval '75 seconds'"
    database.execute(f"UPDATE walbrook.sources SET seen_at = {old}, current_at = {old}")
    answer = client.get("/health")
    assert answer.status_code == 503
    (complaint,) = answer.json()["complaints"]
    assert complaint.startswith("the reader of shop has reported nothing for 75 s")
    assert 'walbrook_source_streaming{source="shop"} 0.0' in client.get("/metrics").text


def test_a_reader_that_is_behind_the_clock_shows_as_lag_of_everyone(
    client: httpx.Client, database: Database
) -> None:
    database.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn) VALUES ('shop', 'all', '0/64')"
    )
    lags = "SELECT min(lag_seconds)::int, max(lag_seconds)::int FROM walbrook.cursors"
    database.execute(
        "UPDATE walbrook.sources SET log_lsn = '0/64', log_idx = 0, seen_at = now(), "
        "current_at = now() - interval '20 seconds'"
    )
    assert database.execute(lags) == [(0, 0)], "a row is written about every ten seconds"
    database.execute("UPDATE walbrook.sources SET current_at = now() - interval '75 seconds'")
    ((least, most),) = database.execute(lags)
    assert 75 <= least <= most < 120
    (complaint,) = client.get("/health").json()["complaints"]
    assert "the reader of shop is 75 s behind the server" in complaint


def test_a_source_of_another_service_is_not_shown(client: httpx.Client, database: Database) -> None:
    database.execute(_SOURCE.replace("shop", "gone").replace("streaming", "disconnected"))
    with database.connect() as connection:
        report_conditions(connection, "gone", 1, [Condition("slot_lost", "error", "it is lost")])
    assert client.get("/health").status_code == 503
    own = HealthReader(database.dsn, OneProcess(), ["shop"])
    sight = own.read()
    assert own.complaints(sight) == []
    assert [row["source"] for row in sight.sources] == ["shop"]


def test_a_consumer_that_could_not_move_while_the_service_was_down_is_not_stuck(
    client: httpx.Client, database: Database
) -> None:
    database.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, moved_at) "
        "VALUES ('shop', 'search', '0/8', now() - interval '1 hour'); "
        "UPDATE walbrook.sources SET log_lsn = '0/64', log_idx = 0"
    )
    for started_at, stuck in ((time.monotonic(), False), (time.monotonic() - 60, True)):
        seen = HealthReader(database.dsn, OneProcess(), started_at=started_at)
        complaints = seen.complaints(seen.read())
        assert ("search is behind and has not moved for 30 s" in complaints) == stuck


def test_metrics_count_what_a_consumer_went_on_without(
    client: httpx.Client, database: Database
) -> None:
    database.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, dead) "
        "VALUES ('shop', 'search', '0/64', 7)"
    )
    line = 'walbrook_consumer_dead_letters_total{consumer="search",source="shop"} 7.0'
    assert line in client.get("/metrics").text.splitlines()


def test_metrics_count_open_events_and_show_log_slot_and_heartbeat(
    client: httpx.Client, database: Database
) -> None:
    tell(database, Condition("slot_at_risk", "warning", "the slot is at risk"))
    lines = client.get("/metrics").text.splitlines()
    risk = 'walbrook_health_events{kind="slot_at_risk",severity="warning",source="shop"} 1.0'
    assert risk in lines
    assert 'walbrook_source_log_bytes{source="shop"} 4096.0' in lines
    assert 'walbrook_source_slot_safe_bytes{source="shop"} 1000.0' in lines
    (age,) = [line for line in lines if line.startswith("walbrook_source_heartbeat_age_seconds{")]
    assert 5 <= float(age.split()[-1]) < 60
    database.execute("UPDATE walbrook.sources SET slot_safe_bytes = NULL")
    assert "source_slot_safe_bytes{" not in client.get("/metrics").text


def test_metrics_show_the_pressure_on_a_source(client: httpx.Client, database: Database) -> None:
    assert "walbrook_pressure_level{" not in client.get("/metrics").text
    shown = PressureStatus(2, 10, 1000, 12.0, 0.9, 4.0, ("search",), 16, 3, 1)
    with database.connect() as connection:
        show_pressure(connection, "shop", 0, shown)
        assert connection.execute("SELECT * FROM walbrook.pressure").fetchall() == [], "fenced"
        show_pressure(connection, "shop", 1, shown)
    lines = client.get("/metrics").text.splitlines()
    assert 'walbrook_pressure_level{source="shop"} 2.0' in lines
    assert 'walbrook_delivery_slots_busy{source="shop"} 3.0' in lines


def test_a_deferred_consumer_is_not_stuck(client: httpx.Client, database: Database) -> None:
    database.execute("UPDATE walbrook.sources SET log_lsn = '0/100', log_idx = 0")
    database.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, moved_at, state_reason) "
        "VALUES ('shop', 'search', '0/64', now() - interval '50 seconds', 'deferred: pressure')"
    )
    assert client.get("/health").json()["complaints"] == []
    database.execute("UPDATE walbrook.consumers SET state_reason = 'it is behind the others'")
    (complaint,) = client.get("/health").json()["complaints"]
    assert complaint == "search is behind and has not moved for 30 s"


def test_a_paused_consumer_is_shown_as_that_and_is_no_complaint(
    client: httpx.Client, database: Database
) -> None:
    database.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, last_error, moved_at)"
        "VALUES ('shop', 'search', '0/10', 'it is down', now() - interval '1 hour')"
    )
    database.execute("UPDATE walbrook.sources SET log_lsn = '0/64', log_idx = 0")
    assert client.get("/health").json()["complaints"] == ["deliveries to search fail"]
    database.execute("SELECT walbrook.pause('search')")
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["complaints"]) == (200, [])
    (row,) = answer.json()["consumers"]
    assert row["paused_at"] is not None
    line = 'walbrook_consumer_paused{consumer="search",source="shop"} 1.0'
    assert line in client.get("/metrics").text


def test_metrics_count_what_waits_and_what_is_handed_out(
    client: httpx.Client, database: Database
) -> None:
    database.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn, destination) "
        "VALUES ('shop', 'search', '0/64', 'webhook'), ('shop', 'jobs', '0/64', 'pull')"
    )
    database.execute("SELECT walbrook.make_queue(id) FROM walbrook.consumers")
    database.execute(
        "INSERT INTO walbrook.events (consumer, commit_lsn, commit_idx, due_at, commit_timestamp, "
        "xid, table_schema, table_name, action, record_pks) "
        "SELECT id, '0/50', 1, now(), now(), 1, 'public', 't', 'insert', '[]' "
        "FROM walbrook.consumers WHERE name = 'search'"
    )
    database.execute("UPDATE walbrook.events SET queued_at = now() - interval '50 seconds'")
    lines = client.get("/metrics").text.splitlines()
    assert 'walbrook_consumer_waiting{consumer="search",source="shop"} 1.0' in lines
    assert 'walbrook_consumer_queue_depth{consumer="jobs",source="shop"} 0.0' in lines
    (age,) = [line for line in lines if line.startswith("walbrook_consumer_oldest_waiting")]
    assert 'consumer="search"' in age
    assert 50 <= float(age.split()[-1]) < 120
    assert 'walbrook_consumer_leased{consumer="jobs",source="shop"} 0.0' in lines
    assert not [line for line in lines if line.startswith('walbrook_consumer_waiting{consumer="j')]


MERGED = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn, term, state)
VALUES ('depot', 's', 'p', '1', '0/64', 1, 'streaming');
UPDATE walbrook.sources SET log_lsn = '0/100', log_idx = 0;
INSERT INTO walbrook.consumers (source, name, cursor_lsn, moved_at)
VALUES ('shop', 'merged', '0/64', now() - interval '1 hour'),
       ('depot', 'merged', '0/64', now() - interval '1 hour');
INSERT INTO walbrook.event_time (consumer, base_lsn, watermark) VALUES ('merged', '0/3', 1500000);
INSERT INTO walbrook.event_sources (consumer, ledger, cursor_lsn, cursor_idx, read_lsn, read_idx)
SELECT id, ledger, cursor_lsn, cursor_idx, '0/100', 0 FROM walbrook.consumers;
INSERT INTO walbrook.event_partitions
       (consumer, table_name, watermark, idle_since, buffered, late)
SELECT id, 'public.event', CASE source WHEN 'shop' THEN 1794928028123456 END,
       CASE source WHEN 'depot' THEN now() END, 3, 2 FROM walbrook.consumers;
"""


def test_metrics_show_event_time_by_table_and_its_sums_by_consumer(
    client: httpx.Client, database: Database
) -> None:
    assert "walbrook_event_time_buffered{" not in client.get("/metrics").text
    database.execute(MERGED)
    lines = client.get("/metrics").text.splitlines()
    shown = {line for line in lines if line.startswith("walbrook_event_time_")}
    shop = '{consumer="merged",source="shop",table="public.event"}'
    depot = '{consumer="merged",source="depot",table="public.event"}'
    assert shown == {
        'walbrook_event_time_watermark_timestamp_seconds{consumer="merged"} 1.5',
        'walbrook_event_time_tables{consumer="merged"} 2.0',
        'walbrook_event_time_idle_tables{consumer="merged"} 1.0',
        'walbrook_event_time_buffered{consumer="merged"} 6.0',
        'walbrook_event_time_late_total{consumer="merged"} 4.0',
        f"walbrook_event_time_table_watermark_timestamp_seconds{shop} 1.794928028123456e+09",
        f"walbrook_event_time_table_idle{shop} 0.0",
        f"walbrook_event_time_table_idle{depot} 1.0",
        *(f"walbrook_event_time_table_buffered{table} 3.0" for table in (shop, depot)),
        *(f"walbrook_event_time_table_late_total{table} 2.0" for table in (shop, depot)),
    }
    database.execute("SELECT walbrook.set_partition_idle('shop/merged', 'public.event')")
    lines = client.get("/metrics").text.splitlines()
    assert f"walbrook_event_time_table_idle{shop} 1.0" in lines, "an operator said so"
    assert 'walbrook_event_time_idle_tables{consumer="merged"} 2.0' in lines
    database.execute("SELECT walbrook.set_partition_idle('shop/merged', 'public.event', false)")
    lines = client.get("/metrics").text.splitlines()
    assert f"walbrook_event_time_table_idle{shop} 0.0" in lines
    database.execute("SELECT walbrook.finish_source('merged', 'shop')")
    lines = client.get("/metrics").text.splitlines()
    assert f"walbrook_event_time_table_idle{shop} 1.0" in lines, "nobody waits for it"
    assert 'walbrook_event_time_idle_tables{consumer="merged"} 2.0' in lines


def test_metrics_of_more_tables_than_can_be_followed_are_sums_alone(
    client: httpx.Client, database: Database
) -> None:
    database.execute(MERGED)
    database.execute(
        "INSERT INTO walbrook.event_partitions (consumer, table_name, buffered)"
        "SELECT min(id), 'public.t' || n, 1 FROM walbrook.consumers, generate_series(1, 499) n "
        "GROUP BY n"
    )
    lines = client.get("/metrics").text.splitlines()
    assert 'walbrook_event_time_buffered{consumer="merged"} 505.0' in lines
    assert 'walbrook_event_time_tables{consumer="merged"} 501.0' in lines
    assert not [line for line in lines if line.startswith("walbrook_event_time_table_")]


def test_a_consumer_that_holds_changes_back_is_stuck_only_if_it_does_not_read_on(
    client: httpx.Client, database: Database
) -> None:
    database.execute(MERGED)
    database.execute("UPDATE walbrook.event_time SET moved_at = now() - interval '50 seconds'")
    assert client.get("/health").json()["complaints"] == []
    database.execute("UPDATE walbrook.sources SET log_idx = 1")
    complaints = client.get("/health").json()["complaints"]
    assert complaints == ["merged is behind and has not moved for 30 s"], "once, for both"
    database.execute("SELECT walbrook.pause('shop/merged')")
    assert client.get("/health").json()["complaints"] == []
    assert {row["paused_at"] is None for row in client.get("/health").json()["consumers"]} == {
        False
    }


def test_each_source_and_consumer_is_well_or_says_since_when_why_and_what_to_do(
    client: httpx.Client, database: Database
) -> None:
    database.execute(
        "INSERT INTO walbrook.consumers (source, name, cursor_lsn) "
        "VALUES ('shop', 'search', '0/64')"
    )

    def states() -> dict[str | None, dict[str, Any]]:
        return {each["consumer"]: each for each in client.get("/health").json()["states"]}

    well = states()
    assert {consumer: state["health"] for consumer, state in well.items()} == {
        None: "ok",
        "search": "ok",
    }
    risk = Condition("slot_at_risk", "warning", "the slot is at risk", "give it room")
    tell(database, risk, Condition("slot_lost", "error", "the slot is lost", "create it"))
    state = states()[None]
    assert (state["health"], state["kind"], state["open_events"]) == ("error", "slot_lost", 2)
    assert (state["cause"], state["remedy"]) == ("the slot is lost", "create it")
    assert state["link"] == "docs/operations.md#slot_lost"
    lines = client.get("/metrics").text.splitlines()
    assert 'walbrook_health_state{consumer="",source="shop"} 2.0' in lines
    assert 'walbrook_health_state{consumer="search",source="shop"} 0.0' in lines
    tell(database)
    assert states()[None]["health"] == "ok"
    assert states()[None]["since"] > well[None]["since"], "since the last event ended"


def test_the_state_of_heartbeats_is_one_of_those_that_there_are(
    client: httpx.Client, database: Database
) -> None:
    assert "walbrook_source_heartbeat_state{" not in client.get("/metrics").text
    database.execute("UPDATE walbrook.sources SET heartbeat_state = 'stale'")
    assert client.get("/health").json()["sources"][0]["heartbeat_state"] == "stale"
    lines = client.get("/metrics").text.splitlines()
    assert 'walbrook_source_heartbeat_state{source="shop",state="stale"} 1.0' in lines
    assert 'walbrook_source_heartbeat_state{source="shop",state="ok"} 0.0' in lines
