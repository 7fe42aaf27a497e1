"""``/healthz`` and ``/readyz`` over a state database and processes with something to tell."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from cdc.config import Http
from cdc.service.http.server import HttpServer
from cdc.state.migrate import migrate
from tests.fix_postgres import Database
from tests.waiting import until

pytestmark = pytest.mark.migrated

_SOURCE = """
INSERT INTO walbrook.sources
       (name, slot, publication, system_identifier, restart_lsn, term, state, seen_at)
VALUES ('shop', 's', 'p', '1', '0/64', 1, 'streaming', clock_timestamp());
INSERT INTO walbrook.consumers (source, name, cursor_lsn, state)
VALUES ('shop', 'search', '0/64', 'live'), ('shop', 'files', '0/64', 'catching_up')
"""


class Processes:
    def __init__(self) -> None:
        self.running = {"reader shop": True, "driver": True}
        self.waits_for: list[str] = []
        self.silence_s = 0.0

    def processes(self) -> dict[str, bool]:
        return self.running

    def starting(self) -> list[str]:
        return self.waits_for

    def silent_s(self) -> float:
        return self.silence_s


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.fixture
def sources() -> list[str]:
    """Those that the service serves; the configuration may be changed while it runs."""
    return ["shop"]


@pytest.fixture
def client(database: Database, processes: Processes, sources: list[str]) -> Iterator[httpx.Client]:
    with database.connect() as connection:
        migrate(connection)
        connection.execute(_SOURCE)
    with (
        HttpServer(Http(port=0), database.dsn, processes, sources) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as ours,
    ):
        yield ours


def unready(client: httpx.Client, *reasons: str) -> None:
    """Wait for an answer with these reasons: one of less than a second ago is given again."""

    def answered() -> bool:
        answer = client.get("/readyz")
        assert (answer.status_code == 200) == (not answer.json()["reasons"])
        return bool(answer.json()["reasons"] == [*reasons])

    until(f"the reasons {reasons}", answered, 20)


def test_a_service_that_streams_and_delivers_is_ready(client: httpx.Client) -> None:
    unready(client)


def test_a_process_that_is_down_or_starting_makes_the_service_unready(
    client: httpx.Client, processes: Processes
) -> None:
    processes.running["driver"] = False
    unready(client, "driver does not run")
    processes.running["driver"], processes.waits_for = True, ["driver"]
    unready(client, "driver is starting")


def test_a_sink_that_fails_alone_leaves_the_service_ready_and_the_last_one_does_not(
    client: httpx.Client, database: Database
) -> None:
    database.execute("UPDATE walbrook.consumers SET state = 'waiting' WHERE name = 'search'")
    unready(client)
    database.execute("UPDATE walbrook.consumers SET state = 'failed' WHERE name = 'files'")
    unready(client, "no consumer of shop is served")
    database.execute("UPDATE walbrook.consumers SET paused_at = now()")
    unready(client)


def test_a_reader_that_is_away_or_silent_makes_the_service_unready(
    client: httpx.Client, database: Database
) -> None:
    database.execute("UPDATE walbrook.sources SET state = 'disconnected'")
    unready(client, "the reader of shop is disconnected")
    database.execute(
        "UPDATE walbrook.sources SET state = 'streaming', seen_at = now() - interval '1 minute'"
    )
    unready(client, "the reader of shop is silent")
    database.execute("DELETE FROM walbrook.sources")
    unready(client, "shop was never read")


def test_readiness_follows_the_databases_that_the_configuration_adds_and_removes(
    client: httpx.Client, database: Database, sources: list[str]
) -> None:
    sources.append("depot")
    unready(client, "depot was never read")
    database.execute("UPDATE walbrook.sources SET state = 'stopped'")
    sources[:] = []
    unready(client)


def test_liveness_asks_no_database_and_fails_when_the_main_loop_hangs(
    client: httpx.Client, database: Database, processes: Processes
) -> None:
    database.execute("DROP SCHEMA walbrook CASCADE")
    assert client.get("/healthz").status_code == 200
    unready(client, "the state database does not answer")
    processes.silence_s = 301.0
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (503, "hangs")
