"""A dead letter of any size is written, however short the timeouts of the connection are."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from cdc.connection import connect
from cdc.cursor import Cursor
from cdc.state.dead_letters import DeadLetter
from cdc.state.migrate import migrate
from cdc.state.positions import Settlement, register_source, settle
from tests.fix_postgres import Database

pytestmark = pytest.mark.migrated

SIZE = 100 << 20
START, END = Cursor(100, 0), Cursor(200, 0)


def test_a_large_dead_letter_is_settled_within_the_timeouts(database: Database) -> None:
    payload = random.Random(1).randbytes(1 << 20) * (SIZE >> 20)
    now = datetime.now(UTC)
    letter = DeadLetter(START, now, "public", "t", "insert", "decode", "large", payload, None)
    with connect(database.dsn, name="test", statement_s=1) as state:
        migrate(state)
        term = register_source(
            state,
            name="shop",
            slot="s",
            publication="p",
            system_identifier="1",
            slot_lsn=START.lsn,
            consumers=["hook"],
        )
        one = Settlement(START, END, dead=[letter])
        settle(state, source="shop", term=term, read_to=END, consumers={"hook": one})
        assert state.execute(
            "SELECT length(payload), (SELECT dead FROM walbrook.consumers) "
            "FROM walbrook.dead_letters"
        ).fetchall() == [(SIZE, 1)]
        assert state.execute("SHOW statement_timeout").fetchall() == [("1s",)]
