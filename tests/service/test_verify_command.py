"""The exit status of ``walbrook verify``, by what its rows in the state database come to."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cdc.service.cli.entry import app
from cdc.state.verification_operators import LISTED_MAX
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import _url

_CONSUMER = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, term, restart_lsn)
VALUES ('shop', 's', 'p', '1', 1, '0/10');
INSERT INTO walbrook.consumers (source, name, cursor_lsn, cursor_idx)
VALUES ('shop', 'mirror', '0/10', 0)
"""
_DONE = "UPDATE walbrook.verifications SET state = 'done', missing = 0, extra = 0, different = 0"
_TABLES = f"""
INSERT INTO walbrook.verifications (request, source, consumer, table_schema, table_name)
SELECT request, source, consumer, 'public', 't' || i
  FROM walbrook.verifications, generate_series(1, {LISTED_MAX + 1}) AS i
"""


@pytest.mark.migrated
@pytest.mark.parametrize(
    ("found", "status"),
    [
        (f"{_DONE}, changing = 0", 0),
        (f"{_DONE}, changing = 1", 1),
        ("DELETE FROM walbrook.verifications", 1),
        # The first of more tables than are listed at once.
        (f"{_TABLES}; {_DONE}, changing = 0; "
         "UPDATE walbrook.verifications SET missing = 1 WHERE id = request", 1),
    ],
    ids=["equal", "changing", "no table", "many tables"],
)  # fmt: skip
def test_status_0_says_that_everything_is_equal(
    database: Database, tmp_path: Path, found: str, status: int
) -> None:
    database.execute(_CONSUMER)
    config = tmp_path / "walbrook.yaml"
    url = _url(database.dsn)
    config.write_text(json.dumps({
        "databases": [
            {"name": "shop", "url": url, "slot": {"name": "s"}, "publication": {"name": "p"}}
        ],
        "sinks": [
            {"name": "mirror", "database": "shop", "destination": {"type": "postgres", "url": url}}
        ],
        "log": {"directory": str(tmp_path / "log")},
    }))  # fmt: skip

    def serve() -> None:
        waiting = "SELECT 1 FROM walbrook.verifications WHERE request IS NOT NULL"
        until("the verification", lambda: database.execute(waiting))
        database.execute(found)

    service = threading.Thread(target=serve)
    service.start()
    result = CliRunner().invoke(app, ["verify", "mirror", "-c", str(config)])
    service.join()
    assert result.exit_code == status, result.output
