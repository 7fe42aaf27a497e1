"""The service as an operator meets it: starts, lost children, a lost slot, no orphans."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import psycopg

from cdc.log.view import LogView
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service, running


def test_a_second_start_is_harmless_lost_children_come_back_and_none_is_orphaned(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    sinks: list[dict[str, object]] = [
        {"name": "files", "destination": {"type": "file", "path": "out"}}
    ]
    with running(database, tmp_path / "first", sinks) as first:
        port = first.http_port()
        database.execute("INSERT INTO item VALUES (1, 'before')")
        first.until_settled()
        # A lock that is lost with its connection is taken again.
        ended = database.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE "
            "application_name = 'walbrook:service' AND datname = current_database()"
        )
        assert ended == [(True,)]
        first.until("the lock to be ours again", _LOCKED)
        with ThreadPoolExecutor(1) as beside:  # it waits for the lock for a while
            refused = beside.submit(Service(database, tmp_path / "second", sinks).run, "run")
            assert first.kill("java")
            until("health to say so", lambda: _health(port)[0] == 503)
            database.execute("INSERT INTO item VALUES (2, 'after')")
            first.until_settled()
            second = refused.result()
        assert second.returncode == 1
        assert "another service serves source shop" in second.stderr
        lines = (tmp_path / "first" / "out").glob("*.jsonl")
        assert sum(len(file.read_bytes().splitlines()) for file in lines) == 2

        supervisor, *children = first.tree()
        assert children
        supervisor.kill()
        until("the children to follow", lambda: not [c for c in children if _alive(c)], 60)


def test_a_lost_slot_is_never_rebuilt_silently_and_the_log_is_delivered_first(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    sinks: list[dict[str, object]] = [
        {"name": "files", "destination": {"type": "file", "path": "out"}}
    ]
    with running(database, tmp_path, sinks) as service:
        until("the driver", lambda: "stage.started" in service.log_tail(200), 60)
        service.kill("spark_pipeline")
        database.execute("INSERT INTO item VALUES (1, 'in the log only')")
        until("the reader to take it", lambda: _rows_in_log(tmp_path / "log" / "shop"))
        service.kill()
    drop = f"SELECT pg_drop_replication_slot('{service.slot}')"
    until("the slot to be free", lambda: _executed(database, drop))

    answer = service.run("run")
    assert answer.returncode == 1
    assert "no longer exists" in answer.stderr
    assert database.execute("SELECT count(*) FROM pg_replication_slots") == [(0,)]

    database.execute(f"SELECT pg_create_logical_replication_slot('{service.slot}', 'pgoutput')")
    answer = service.run("run")
    assert answer.returncode == 1, answer.stderr
    assert "the changes between are gone" in answer.stderr
    (file,) = (tmp_path / "out").glob("*.jsonl")
    assert "in the log only" in file.read_text()


def test_a_source_that_is_not_ready_is_refused_in_one_paragraph(
    database: Database, tmp_path: Path
) -> None:
    sinks: list[dict[str, object]] = [
        {
            "name": "files",
            "source": {"include_tables": ["public.missing"]},
            "destination": {"type": "file", "path": "out"},
        }
    ]
    service = Service(database, tmp_path, sinks)
    answer = service.run("run")
    assert answer.returncode == 1
    assert "public.missing" in answer.stderr
    assert "Traceback" not in answer.stderr
    slots = "SELECT 1 FROM pg_replication_slots WHERE database = current_database()"
    assert database.execute(slots) == []


def test_a_start_that_is_refused_its_port_leaves_no_slot_behind(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    sinks: list[dict[str, object]] = [
        {"name": "f", "destination": {"type": "file", "path": "out"}},
    ]
    service = Service(database, tmp_path, sinks)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        service.configure({"service": {"http": {"port": taken.getsockname()[1]}}})
        answer = service.run("run")
    assert answer.returncode == 1
    assert "cannot listen" in answer.stderr
    slots = "SELECT 1 FROM pg_replication_slots WHERE database = current_database()"
    assert database.execute(slots) == []


def test_the_commands_say_what_to_do(database: Database, tmp_path: Path) -> None:
    service = Service(database, tmp_path, [])
    status = service.run("status")
    assert status.returncode == 1
    assert "walbrook migrate" in status.stderr
    assert "applied 0001" in service.run("migrate").stdout
    assert "up to date" in service.run("migrate").stdout
    assert service.run("status").returncode == 0
    assert "correct: 1 database, 0 sinks" in service.run("config", "check").stdout
    shown = service.run("config", "show").stdout
    assert "***" in shown
    service.config.write_text("databases: []\nsinkz: []\n")
    wrong = service.run("config", "check")
    assert wrong.returncode == 1
    assert "sinkz" in wrong.stderr
    assert "sinks" in wrong.stderr


_LOCKED = """
SELECT count(*) > 0 FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE l.locktype = 'advisory' AND l.granted AND a.application_name = 'walbrook:service'
   AND a.datname = current_database()
"""


def _rows_in_log(directory: Path) -> int:
    view = LogView(directory)
    return int(view.entries(view.first_batch(), view.next_batch())["rows"].sum())


def _executed(database: Database, statement: str) -> bool:
    try:
        database.execute(statement)
    except psycopg.errors.ObjectInUse:
        return False
    return True


def _health(port: int) -> tuple[int, str]:
    answer = httpx.get(f"http://127.0.0.1:{port}/health", timeout=10)
    return answer.status_code, answer.json()["status"]


def _zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _alive(process: psutil.Process) -> bool:
    return bool(process.is_running()) and not _zombie(process)
