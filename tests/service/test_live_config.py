"""A service that runs while its configuration changes: by SQL, the command line, HTTP and SIGHUP.

All tests share one service, and each leaves it with the sink ``stays`` alone.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.fix_postgres import Database, PostgresServer, fresh_database
from tests.log_pipeline import arrived
from tests.waiting import until
from tests.walbrook_service import Service, _url, started

TABLES = ("a", "b", "c", "d")
_ANSWER = "SELECT state, result FROM walbrook.config_answer({request}, wait => '100 s')"

pytestmark = pytest.mark.timeout(400)


class Live:
    """The service, what it is configured as, and the rows that its sinks got."""

    def __init__(self, service: Service) -> None:
        self.service, self.database = service, service.database
        self.directory = service.directory
        self._next = 1

    def write(self, table: str) -> int:
        """Insert one row. Returns its id."""
        self._next += 1
        self.database.execute(f"INSERT INTO {table} VALUES ({self._next}, 'n')")
        return self._next

    def got(self, sink: str) -> list[int]:
        return [message["record"]["id"] for message in arrived(self.directory / sink)]

    def until_got(self, sink: str, *ids: int) -> None:
        until(f"{ids} at {sink}", lambda: set(ids) <= set(self.got(sink)), 60)

    def configure(self, change: dict[str, Any] | None = None, *sinks: dict[str, object]) -> None:
        """The file with ``stays`` and these sinks; ``change`` is of its first database."""
        config = yaml.safe_load(self.service.config.read_text())
        config["databases"] = [{**config["databases"][0], **(change or {})}]
        config["sinks"] = [STAYS, *sinks]
        config.pop("spark")
        config["spark"] = SPARK
        self.service.config.write_text(yaml.safe_dump(config, sort_keys=False))

    def walbrook(self, *arguments: str) -> str:
        done = self.service.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str) -> str:
        done = self.service.run(*arguments)
        assert done.returncode == 1
        return " ".join(done.stderr.split())

    def by_sql(self, action: str) -> tuple[str, str]:
        ((request,),) = self.database.execute(f"SELECT walbrook.{action}_config()")
        ((state, result),) = self.database.execute(_ANSWER.format(request=request))
        return state, result

    def by_http(self, action: str, body: dict[str, object] | None = None) -> httpx.Response:
        url = f"http://127.0.0.1:{self.service.http_port()}/api/config/{action}"
        return httpx.post(url, json=body or {}, timeout=120)

    def revision(self) -> int:
        ((revision,),) = self.database.execute("SELECT max(revision) FROM walbrook.configurations")
        return int(revision)

    def active(self) -> list[str]:
        rows = self.database.execute("SELECT name FROM walbrook.consumers WHERE active ORDER BY 1")
        return [name for (name,) in rows]

    def driver(self) -> int:
        """Its process; 0 while there is none."""
        for process in self.service.tree():
            with suppress(psutil.NoSuchProcess):
                if "spark_pipeline" in process.cmdline():
                    return int(process.pid)
        return 0


def sink(name: str, table: str, **more: object) -> dict[str, object]:
    return {
        "name": name,
        "source": {"include_tables": [f"public.{table}"]},
        "destination": {"type": "file", "path": name},
        **more,
    }


STAYS = sink("stays", "a")
SPARK = {"checkpoint_directory": "spark", "driver_memory": "512m"}
PUBLICATION = {"name": "pub", "create_if_not_exists": True, "tables": ["public.a", "public.b"]}


@pytest.fixture(scope="module")
def running_service(
    postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    with fresh_database(postgres_server.dsn) as database:
        for table in TABLES:
            database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, name text)")
        directory = tmp_path_factory.mktemp("live") / "service"
        live = Live(Service(database, directory, [STAYS]))
        live.configure({"publication": PUBLICATION})
        with started(live.service):
            yield live


@pytest.fixture
def live(running_service: Live) -> Iterator[Live]:
    yield running_service
    running_service.configure({"publication": PUBLICATION})
    assert running_service.by_sql("apply")[0] == "done"
    assert running_service.active() == ["stays"]


def test_a_sink_is_added_by_sql_changed_by_the_command_line_and_removed_by_http(
    live: Live,
) -> None:
    driver, first = live.driver(), live.write("a")
    live.until_got("stays", first)

    live.configure({}, sink("more", "a"))
    assert live.by_sql("plan") == ("done", "sink more: added, at once")
    assert live.active() == ["stays"]
    assert live.by_sql("apply")[0] == "done"
    second = live.write("a")
    live.until_got("more", second)

    live.configure({}, sink("more", "b"))
    planned = json.loads(live.walbrook("config", "plan", "--json"))
    assert [(c["name"], c["effect"]) for c in planned["changes"]] == [
        ("more", "its worker begins again")
    ]
    assert "sink more: changed" in live.walbrook("config", "apply")
    third, fourth = live.write("a"), live.write("b")
    live.until_got("more", fourth)
    assert third not in live.got("more")

    live.configure()
    assert live.by_http("plan").json()["result"] == "sink more: removed, at once"
    answer = live.by_http("apply")
    assert (answer.status_code, answer.json()["state"]) == (200, "done")
    assert live.active() == ["stays"]
    live.until_got("stays", first, second, third, live.write("a"))
    ((reason,),) = live.database.execute(
        "SELECT state_reason FROM walbrook.consumers WHERE name = 'more'"
    )
    assert reason == "it is not active"
    assert live.driver() == driver, "another driver serves now"


def test_a_wrong_file_changes_nothing_not_even_for_a_driver_that_is_started_again(
    live: Live,
) -> None:
    revision, driver = live.revision(), live.driver()
    live.configure({}, {"name": "bad", "destination": {"type": "fax"}})
    assert live.by_sql("apply")[0] == "refused"
    answer = live.by_http("apply")
    assert answer.status_code == 409
    assert "sinks[1].destination.type: should be one of" in answer.json()["error"]["what"]
    assert "should be one of" in live.refused("config", "apply")
    assert live.revision() == revision
    assert live.service.kill("spark_pipeline")
    until("the next driver", lambda: live.driver() not in (0, driver))
    live.until_got("stays", live.write("a"))


def test_what_needs_a_restart_is_refused_as_a_whole_or_left_out(live: Live) -> None:
    live.configure({}, sink("partly", "a"))
    live.service.configure({"spark": {**SPARK, "patience_ms": 900}})
    refusal = live.refused("config", "apply")
    assert "spark: changed, needs a restart of the service" in refusal
    assert "patience_ms: 1000 → 900" in refusal
    assert live.active() == ["stays"]
    applied = live.by_http("apply", {"partly": True})
    assert "left out: spark: changed" in applied.json()["result"]
    live.until_got("partly", live.write("a"))


def test_a_hangup_applies_the_file(live: Live) -> None:
    live.configure({}, sink("hung", "a", status="active"))
    live.service.tree()[0].send_signal(signal.SIGHUP)
    live.service.until("the sink", "SELECT true FROM walbrook.consumers WHERE name = 'hung'")
    live.until_got("hung", live.write("a"))
    live.configure({}, sink("hung", "a", status="disabled"))
    live.service.tree()[0].send_signal(signal.SIGHUP)
    live.service.until("its end", "SELECT NOT active FROM walbrook.consumers WHERE name = 'hung'")
    asked = "SELECT DISTINCT asked_by FROM walbrook.config_requests WHERE asked_by = 'SIGHUP'"
    assert live.database.execute(asked) == [("SIGHUP",)]


def test_a_table_that_is_added_to_the_publication_comes_with_its_rows_and_its_changes(
    live: Live,
) -> None:
    driver, before = live.driver(), live.write("c")
    everything = {"name": "everything", "destination": {"type": "file", "path": "everything"}}
    live.configure({}, {**everything, "initial_backfill": True})
    assert live.by_sql("apply")[0] == "done"
    live.until_got("everything", live.write("b"))
    first = "SELECT count(*) = 2 FROM walbrook.backfills WHERE consumer = 'everything'"
    live.service.until("the rows of its first tables", f"{first} AND state = 'done'")
    assert before not in live.got("everything")

    more = [*PUBLICATION["tables"], "public.c"]  # type: ignore[misc]
    live.configure(
        {"publication": {**PUBLICATION, "tables": more}}, {**everything, "initial_backfill": True}
    )
    state, result = live.by_sql("apply")
    assert state == "done"
    assert "sink everything gets the existing rows of public.c" in result
    live.until_got("everything", before, live.write("c"))
    assert live.driver() == driver

    live.configure({"publication": PUBLICATION})
    assert live.by_sql("apply")[0] == "done"
    names = "SELECT tablename::text FROM pg_publication_tables WHERE pubname = 'pub' ORDER BY 1"
    assert live.database.execute(names) == [("a",), ("b",)]


def test_a_sink_that_names_a_table_nobody_publishes_is_refused_with_the_statement(
    live: Live,
) -> None:
    live.configure({}, sink("early", "d"))
    refusal = live.refused("config", "apply")
    assert 'ALTER PUBLICATION "pub" ADD TABLE "public"."d";' in refusal
    assert live.active() == ["stays"]


def test_a_sink_of_another_shape_has_the_feed_decode_for_it_too(live: Live) -> None:
    driver = live.driver()
    live.database.execute("ALTER TABLE a REPLICA IDENTITY FULL")
    live.configure({}, sink("shaped", "a", shape="debezium", timestamp_format="postgres"))
    assert live.by_sql("apply")[0] == "done"
    row = live.write("a")
    live.database.execute(f"UPDATE a SET name = 'other' WHERE id = {row}")

    def changed() -> list[dict[str, Any]]:
        found = arrived(live.directory / "shaped")
        return [m for m in found if m["op"] == "u" and m["after"]["id"] == row]

    (message,) = until("the update", changed, 60)
    assert (message["before"]["name"], message["after"]["name"]) == ("n", "other")
    live.until_got("stays", row)
    assert live.driver() == driver


def test_a_database_is_added_and_removed_while_the_first_is_served(
    live: Live, postgres_server: PostgresServer
) -> None:
    with fresh_database(postgres_server.dsn) as other:
        other.execute("CREATE TABLE stock (id int PRIMARY KEY, name text)")
        config = yaml.safe_load(live.service.config.read_text())
        alone = live.service.config.read_text()
        config["databases"].append(
            {
                "name": "depot",
                "url": _url(other.dsn),
                "slot": {"name": f"slot_{other.name}"[:63], "create_if_not_exists": True},
                "publication": {"name": "pub", "create_if_not_exists": True},
            }
        )
        config["sinks"] = [
            {**STAYS, "database": "shop"},
            {**sink("stock", "stock"), "database": "depot"},
        ]
        config["state"] = {}
        live.service.config.write_text(yaml.safe_dump(config, sort_keys=False))
        assert live.by_sql("apply")[0] == "done"
        live.service.until(
            "its reader", "SELECT state = 'streaming' FROM walbrook.sources WHERE name = 'depot'"
        )
        other.execute("INSERT INTO stock VALUES (1, 'n')")
        live.until_got("stock", 1)
        live.until_got("stays", live.write("a"))

        live.service.config.write_text(alone)
        state, result = live.by_sql("apply")
        assert state == "done"
        assert "pg_drop_replication_slot" in result
        _until_unused(other)
        live.until_got("stays", live.write("a"))
        live.service.until(
            "its state", "SELECT state = 'stopped' FROM walbrook.sources WHERE name = 'depot'"
        )


def test_what_runs_is_exported_and_is_the_same_configuration(live: Live) -> None:
    live.configure({}, sink("shown", "a"))
    assert live.by_sql("apply")[0] == "done"
    shown = yaml.safe_load(live.walbrook("config", "export"))
    assert [each["name"] for each in shown["sinks"]] == ["stays", "shown"]
    password = live.service.config.read_text().partition("url: ")[2].partition(":")[2]
    assert password.partition("@")[0].rpartition(":")[2] not in str(shown["databases"])
    url = f"http://127.0.0.1:{live.service.http_port()}/api/config"
    assert yaml.safe_load(httpx.get(url, timeout=20).json()["document"]) == shown
    ((document,),) = live.database.execute("SELECT walbrook.running_config()")
    assert yaml.safe_load(document) == shown


def _until_unused(database: Database) -> None:
    unused = "SELECT bool_and(NOT active) FROM pg_replication_slots WHERE database = '{}'"
    until(
        "nobody to read its slot",
        lambda: database.execute(unused.format(database.name)) == [(True,)],
        60,
    )


def test_a_renamed_table_is_followed_and_its_new_name_applied_without_a_lost_change(
    live: Live,
) -> None:
    driver, first = live.driver(), live.write("a")
    try:
        live.database.execute("ALTER TABLE a RENAME TO z")
        second = live.write("z")
        live.until_got("stays", first, second)
        live.service.until(
            "the event",
            "SELECT severity = 'warning' AND what LIKE 'stays takes public.a, which is called "
            "public.z now: it follows the table%' FROM walbrook.health "
            "WHERE kind = 'tables_renamed'",
        )
        renamed = {**STAYS, "source": {"include_tables": ["public.z"]}}
        publication = {**PUBLICATION, "tables": ["public.z", "public.b"]}
        live.configure({"publication": publication})
        config = yaml.safe_load(live.service.config.read_text())
        config["sinks"] = [renamed]
        live.service.config.write_text(yaml.safe_dump(config, sort_keys=False))
        third = live.write("z")
        assert live.by_sql("apply")[0] == "done"
        live.until_got("stays", first, second, third, live.write("z"))
        live.service.until("its end", "SELECT count(*) = 0 FROM walbrook.health")
        assert live.driver() == driver
    finally:
        live.database.execute("ALTER TABLE IF EXISTS z RENAME TO a")


def test_a_database_that_is_read_otherwise_begins_again_in_the_same_driver(live: Live) -> None:
    driver, first = live.driver(), live.write("a")
    ((term,),) = live.database.execute("SELECT term FROM walbrook.sources WHERE name = 'shop'")
    live.configure({"heartbeat_s": 2})
    state, result = live.by_sql("apply")
    assert state == "done"
    assert "database shop: changed, its reader and its workers begin again" in result
    live.until_got("stays", first, live.write("a"))
    ((now,),) = live.database.execute("SELECT term FROM walbrook.sources WHERE name = 'shop'")
    assert now == term + 1
    assert live.driver() == driver
    live.configure({"heartbeat_s": 10})


def test_a_sink_in_event_time_order_is_added_and_changed(live: Live) -> None:
    driver = live.driver()
    by_commit = {"column": "commit_timestamp", "idle_timeout": "1s"}
    ordered = sink("ordered", "a", ordering="event_time", event_time=by_commit)
    live.configure({}, ordered)
    assert live.by_sql("apply")[0] == "done"
    first = live.write("a")
    live.until_got("ordered", first)
    live.configure({}, {**ordered, "priority": 7})
    assert "sink ordered: changed" in live.by_sql("apply")[1]
    second = live.write("a")
    live.until_got("ordered", second)
    assert live.got("ordered").count(first) == 1
    assert live.driver() == driver
