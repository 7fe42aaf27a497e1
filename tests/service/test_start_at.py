"""Where a new sink begins."""

from __future__ import annotations

from pathlib import Path

import yaml

from cdc.config.load import loads
from cdc.service.process.prepare import prepare
from tests.fix_postgres import Database
from tests.walbrook_service import Service


def test_a_sink_that_starts_at_latest_gets_nothing_from_before_the_start(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    sinks: list[dict[str, object]] = [
        {
            "name": name,
            "start_at": start,
            "destination": {"type": "file", "path": str(tmp_path / name)},
        }
        for name, start in (("all", "restart"), ("new", "latest"))
    ]
    service = Service(database, tmp_path / "service", sinks)
    settings = yaml.safe_load(service.config.read_text())
    everything = settings | {"sinks": settings["sinks"][:1]}
    prepare(loads(yaml.safe_dump(everything), tmp_path))
    # The slot is there, and nobody reads it while these are committed.
    database.execute("INSERT INTO item SELECT generate_series(1, 100)")
    ((before,),) = database.execute("SELECT pg_current_wal_insert_lsn()")
    prepare(loads(yaml.safe_dump(settings), tmp_path))
    ((later,),) = database.execute("SELECT pg_current_wal_insert_lsn()")
    cursors = database.execute(
        f"SELECT name, cursor_lsn >= '{before}' AND cursor_lsn <= '{later}', cursor_idx "
        "FROM walbrook.consumers ORDER BY name"
    )
    assert cursors == [("all", False, 0), ("new", True, 0)]
