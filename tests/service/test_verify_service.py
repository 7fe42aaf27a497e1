"""``walbrook verify`` and its HTTP API on the whole service."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import Service, _url, started


@pytest.mark.sinks
def test_the_command_and_the_api_compare_and_repair(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, note text);"
        "CREATE TABLE other (id int PRIMARY KEY);"
        "INSERT INTO item SELECT i, 'secret ' || i FROM generate_series(1, 1000) i"
    )
    sinks: list[dict[str, object]] = [
        {"name": "mirror", "database": "shop", "initial_backfill": True,
         "destination": {"type": "postgres", "url": _url(there.dsn)}},
        {"name": "hook", "database": "shop",
         "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}},
    ]  # fmt: skip
    service = Service(database, tmp_path / "service", sinks)
    with started(service), _writing(database):
        service.until(
            "the backfills",
            "SELECT count(*) = 2 AND bool_and(state = 'done') FROM walbrook.backfills",
        )
        equal = service.run("verify", "mirror")
        assert (equal.returncode, equal.stderr) == (0, ""), equal.stdout
        assert "public.item" in equal.stdout
        assert "public.other" in equal.stdout
        there.execute("DELETE FROM item WHERE id = 7; UPDATE item SET note = 'x' WHERE id = 8")
        found = service.run("verify", "mirror", "public.item")
        assert found.returncode == 1
        assert "verification_keys" in found.stdout
        repaired = service.run("verify", "mirror", "item", "--repair")
        assert repaired.returncode == 0, repaired.stdout
        refused = service.run("verify", "hook")
        assert refused.returncode == 1
        assert "a destination of the type webhook cannot be read back" in refused.stdout
        unknown = service.run("verify", "nobody")
        assert unknown.returncode == 1
        assert "nobody" in unknown.stderr

        api = f"http://127.0.0.1:{service.http_port()}"
        begun = _asked(f"{api}/api/consumers/mirror/verifications", b'{"table": "item"}')

        def ended() -> dict[str, Any]:
            (latest, *_) = _asked(f"{api}/api/consumers/mirror/verifications")["data"]
            return latest if latest["state"] == "done" else {}

        latest = until("the verification", ended)
        assert (latest["id"], latest["source_rows"], latest["missing"]) == (begun["id"], 1000, 0)
        assert service.state.execute(
            "SELECT table_name, last_differences FROM walbrook.verified"
            " WHERE consumer = 'mirror' ORDER BY 1"
        ) == [("item", 0), ("other", 0)]
    log = service.log.read_text()
    assert "verify.done" in log
    assert "secret" not in log


@contextmanager
def _writing(database: Database) -> Iterator[None]:
    """Changes of another table all the time."""
    over = threading.Event()

    def write() -> None:
        with database.connect() as connection:
            while not over.wait(0.1):
                connection.execute("INSERT INTO other SELECT coalesce(max(id), 0) + 1 FROM other")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _asked(url: str, body: bytes | None = None) -> dict[str, Any]:
    with urllib.request.urlopen(urllib.request.Request(url, data=body)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
