"""Reload through the whole service, from the command line and over HTTP, beside a live sink."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.fix_postgres import Database
from tests.walbrook_service import Service, _url, started

_ITEMS = "SELECT id, version FROM item ORDER BY id"


@pytest.mark.timeout(600)
def test_a_reload_is_started_and_seen_from_outside(
    database: Database, there: Database, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL);"
        "INSERT INTO item SELECT i, 1 FROM generate_series(1, 1000) AS i"
    )
    mirror: dict[str, object] = {
        "name": "mirror", "database": "shop", "initial_backfill": True,
        "destination": {"type": "postgres", "url": _url(there.dsn)},
    }  # fmt: skip
    files: dict[str, object] = {
        "name": "files", "database": "shop",
        "destination": {"type": "file", "path": str(tmp_path / "files")},
    }  # fmt: skip
    service = Service(database, tmp_path / "service", [mirror, files])
    with started(service):
        service.until(
            "the rows", "SELECT count(*) = 1 FROM walbrook.backfills WHERE state = 'done'"
        )
        there.execute("DELETE FROM item WHERE id <= 10; INSERT INTO item VALUES (5000, 1)")
        done = service.run("backfill", "start", "mirror", "public.item", "--reload", "--wait")
        assert (done.returncode, "reload 2 of public.item" in done.stdout) == (0, True), done.stderr
        assert there.execute(_ITEMS) == database.execute(_ITEMS)
        assert "done (reload)" in service.run("backfill", "status").stdout
        refused = service.run("backfill", "start", "files", "public.item", "--reload")
        assert refused.returncode == 1
        assert "has no tables that could be swapped" in refused.stderr + refused.stdout
        api = f"http://127.0.0.1:{service.http_port()}/api/consumers"
        body = json.dumps({"table": "public.item", "reload": True}).encode()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{api}/files/backfills", body)
        assert caught.value.code == 409
        with urllib.request.urlopen(f"{api}/mirror/backfills", body) as answer:
            assert json.load(answer)["reload"] is True
        service.until(
            "the reload",
            "SELECT count(*) = 2 FROM walbrook.backfills WHERE state = 'done' AND reload",
        )
        equal = service.run("verify", "mirror", "public.item")
        assert equal.returncode == 0, equal.stdout + equal.stderr
