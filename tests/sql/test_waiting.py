"""A wait keeps its connection between its questions, and finds another if that one is lost."""

from __future__ import annotations

from tests.fix_postgres import Database
from tests.waiting import held_now, until

PID = "SELECT pg_backend_pid()"


def test_a_wait_asks_on_one_connection_and_closes_it(database: Database) -> None:
    seen: list[int] = []

    def asked() -> bool:
        seen.append(database.execute(PID)[0][0])
        return len(seen) == 3

    until("three answers", asked)
    assert len(set(seen)) == 1
    assert held_now() is None
    gone = f"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = {seen[0]}"
    until("the connection to be closed", lambda: database.execute(gone)[0][0])
    assert database.execute(PID) != database.execute(PID)


def test_a_wait_whose_connection_is_lost_goes_on(database: Database) -> None:
    seen: list[int] = []

    def asked() -> bool:
        seen.append(database.execute(PID)[0][0])
        with database.connect() as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", [seen[-1]])
        return len(seen) == 3

    until("three answers", asked)
    assert len(set(seen)) == 3
