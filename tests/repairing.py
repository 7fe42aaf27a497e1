"""A source whose slot is dropped, and its repair, on the rig of backfills."""

from __future__ import annotations

from typing import Any

from cdc.config import Config
from cdc.service.process.repair import Repaired, repair
from cdc.state.repairs import Deletes
from tests.backfill_rig import SOURCE, Rig
from tests.waiting import until
from tests.walbrook_service import _url

_HORIZON = """
SELECT coalesce(max(h.xid), 0) FROM walbrook.horizons h JOIN walbrook.consumers c USING (source)
 WHERE c.name = 'files' AND h.lsn <= c.cursor_lsn
"""
_NEXT_XID = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::int8"


def config_of(rig: Rig) -> Config:
    """The configuration that a service of this rig would have."""
    sink = {"name": "files", "database": SOURCE, **rig.sink}
    sink.setdefault("destination", {"type": "file", "path": str(rig.directory / "files")})
    return Config.model_validate(
        {
            "databases": [
                {
                    "name": SOURCE,
                    "url": _url(rig.database.dsn),
                    "slot": {"name": rig.source.settings.slot},
                    "publication": {"name": "pub"},
                }
            ],
            "sinks": [sink],
            "log": {"directory": str(rig.source.settings.log_directory)},
        }
    )


def repaired(rig: Rig, deletes: Deletes = "find") -> Repaired:
    """Begin a repair, as the command does."""
    return repair(config_of(rig), SOURCE, deletes=deletes)


def drop_slot(rig: Rig) -> None:
    rig.database.execute(f"SELECT pg_drop_replication_slot('{rig.source.settings.slot}')")


def note_horizon(rig: Rig) -> None:
    """Serve until a repair would read nothing of what was written so far."""
    ((next_xid,),) = rig.database.execute(_NEXT_XID)
    with rig.running():  # the watch looks when it begins
        rig.until_delivered()
        until("a horizon that is reached", lambda: rig.rows(_HORIZON)[0][0] >= next_xid)


def until_repaired(rig: Rig) -> dict[str, Any]:
    """The last repair once it is done."""
    columns = "state, rows, deleted, tables_whole, found"

    def last() -> tuple[Any, ...]:
        query = f"SELECT {columns} FROM walbrook.repair_progress ORDER BY id DESC LIMIT 1"
        (row,) = rig.rows(query)
        assert row[0] != "failed", rig.rows("SELECT * FROM walbrook.repaired_tables")
        return row

    until("the repair to be done", lambda: last()[0] == "done")
    rig.until_delivered()
    return dict(zip(columns.split(", "), last(), strict=True))
