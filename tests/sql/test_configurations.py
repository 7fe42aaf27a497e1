"""Requests to change the configuration: what SQL refuses by itself."""

from __future__ import annotations

import psycopg
import pytest

from cdc.state.configurations import store_configuration
from tests.fix_postgres import Database

pytestmark = pytest.mark.migrated

_SOURCE = """
INSERT INTO walbrook.sources (name, slot, publication, system_identifier, restart_lsn, state)
VALUES ('shop', 's', 'p', '1', '0/0', 'stopped')
"""
_LOCK = "SELECT pg_advisory_lock(hashtextextended('walbrook.source.shop', 0))"


def test_a_service_that_does_not_run_is_asked_for_nothing(database: Database) -> None:
    with database.connect() as state:
        state.execute(_SOURCE)
        store_configuration(state, ["shop"], "walbrook.yaml", "sinks: []", "start")
        for act in ("plan_config", "apply_config"):
            with pytest.raises(psycopg.Error, match="the service of shop does not run") as refused:
                state.execute(f"SELECT walbrook.{act}()".encode())
            assert refused.value.diag.message_hint == "start it: it runs the file as it is then"
        with database.connect() as service:
            service.execute(_LOCK)
            assert state.execute("SELECT walbrook.plan_config()").fetchone() == (1,)
