"""Operators and the running service: what they do takes effect at once, for that sink alone."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cdc.cursor import Cursor
from tests.fix_http import Endpoint
from tests.fix_postgres import Database
from tests.integration.test_lanes import Shop, _sinks
from tests.integration.test_operators_api import served
from tests.service import Service
from tests.waiting import until

_PAUSED = "SELECT lane IS NULL AND lane_reason = 'it is paused' FROM walbrook.consumers c"
_MESSAGE = """
INSERT INTO walbrook.events
       (consumer, commit_lsn, commit_idx, commit_timestamp, xid, table_schema, table_name, action,
        record, record_pks, due_at)
SELECT id, '{lsn}', {idx}, now(), 7, 'public', 'item', 'insert', '{{}}', '[]',
       now() + interval '1 hour'
  FROM walbrook.consumers WHERE name = 'hook'
"""


class Office:
    """A service whose log is durable, with files and a webhook, of which the latter is acted on."""

    def __init__(self, database: Database, endpoint: Endpoint, directory: Path) -> None:
        self.service = Service(database, directory, _sinks(endpoint))
        settings = yaml.safe_load(self.service.config.read_text())
        settings["log"] |= {"durability": "fsync"}
        self.service.config.write_text(yaml.safe_dump(settings))
        self.shop = Shop(self.service, endpoint)
        self.database, self.endpoint = database, endpoint

    def act(self, call: str) -> None:
        self.database.execute(f"SELECT * FROM walbrook.{call}")

    def walbrook(self, *arguments: str) -> str:
        done = self.service.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def messages(self) -> list[dict[str, Any]]:
        return [m for request in self.endpoint.accepted for m in request.messages]

    def ids(self, since: int = 0) -> list[int]:
        return [m["record"].get("id") for m in self.messages()[since:]]

    def cursor_of(self, id_: int) -> str:
        """Where the change stands that inserted a row."""
        for message in self.messages():
            if message["record"].get("id") == id_:
                at = message["metadata"]
                return str(Cursor(at["commit_lsn"], at["commit_idx"]))
        raise AssertionError(f"{id_} never arrived")

    def until_paused(self) -> None:
        self.service.until("the pause", f"{_PAUSED} WHERE c.name = 'hook'")

    def until_slot_moved(self) -> None:
        """The slot passes what was just written, whoever has not had it."""
        ((lsn,),) = self.database.execute("SELECT pg_current_wal_lsn()")
        self.service.until(
            "the slot to move",
            f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots"
            f" WHERE slot_name = '{self.service.slot}'",
        )


@pytest.fixture
def office(database: Database, endpoint: Endpoint, tmp_path: Path) -> Office:
    database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
    return Office(database, endpoint, tmp_path / "service")


@pytest.mark.timeout(400)
def test_a_paused_sink_gets_nothing_holds_nothing_back_and_catches_up_when_it_is_resumed(
    office: Office,
) -> None:
    service, shop = office.service, office.shop
    service.start()
    try:
        service.until_serving()
        shop.until_in_files(shop.write(10))
        shop.until_served("hook", "shared")

        took: list[float] = []
        for _ in range(5):
            began = time.monotonic()
            office.act("pause('hook')")
            office.until_paused()
            took.append(time.monotonic() - began)
            office.act("resume('hook')")
            shop.until_in_files(shop.write(1))
            shop.until_served("hook", "shared")
        print(f"paused after {', '.join(f'{each:.2f}' for each in took)} s")
        assert statistics.median(took) < 1.0
        before = shop.write(10)
        service.until_settled()
        assert office.ids() == list(range(1, before + 1)), "lost, repeated or out of order"

        assert "hook stands at" in office.walbrook("pause", "hook")
        office.until_paused()
        shop.until_in_files(shop.write(500))
        office.until_slot_moved()
        assert "hook is paused since" in office.walbrook("status")
        assert shop.health() == [("hook", "lane_paused")]

        assert service.stop() == 0, service.log_tail()
        service.start()
        last = shop.write(500)
        shop.until_in_files(last)
        office.until_paused()
        office.until_slot_moved()
        assert len(office.ids()) == before, "a paused sink got something"

        with served(office.database.dsn) as client:
            assert client.post("/hook/resume").json()["paused_at"] is None
        service.until_settled()
        assert office.ids() == list(range(1, last + 1)), "lost, repeated or out of order"
        until("health to be good again", lambda: shop.health() == [])
    finally:
        service.kill()


def _rewind_everywhere(office: Office, client: httpx.Client) -> int:
    """In the shared lane, paused, and failing; the answer is the last id that was written."""
    service, shop = office.service, office.shop
    last = shop.write(50)
    service.until_settled()
    again = len(office.ids())
    answer = client.post("/hook/rewind", json={"to_cursor": office.cursor_of(15)})
    assert answer.status_code == 200, answer.text
    service.until_settled()
    assert office.ids(again) == list(range(15, last + 1)), "not from exactly there"

    office.act("pause('hook')")
    office.until_paused()
    again = len(office.ids())
    office.act("rewind('hook', to_earliest => true)")
    last = shop.write(1)
    shop.until_in_files(last)
    assert len(office.ids()) == again, "a paused sink got something"
    assert "hook stands at" in office.walbrook("resume", "hook")
    service.until_settled()
    assert office.ids(again) == list(range(1, last + 1))

    office.endpoint.refuses, office.endpoint.refusal = (lambda _messages: True), 503
    again = len(office.ids())
    last = shop.write(20)
    shop.until_left("hook", "its sink failed")
    office.walbrook("rewind", "hook", "--to-cursor", office.cursor_of(30))
    office.endpoint.refuses = None
    service.until_settled()
    assert office.ids(again) == list(range(30, last + 1))
    return last


@pytest.mark.timeout(400)
def test_what_is_rewound_comes_again_and_what_is_discarded_leaves_a_gap_message(
    office: Office,
) -> None:
    service, shop, endpoint = office.service, office.shop, office.endpoint
    service.start()
    try:
        service.until_serving()
        with served(office.database.dsn) as client:
            last = _rewind_everywhere(office, client)

            shop.until_served("hook", "shared")
            known = len(office.messages())
            office.database.execute(_MESSAGE.format(lsn="0/8", idx=3))
            answer = client.post("/hook/discard", json={"cursor": "0/8:3"})
            assert answer.status_code == 200, answer.text
        until("the gap message", lambda: len(office.messages()) > known)
        assert office.messages()[known]["action"] == "gap"
        assert office.messages()[known]["record"] == {
            "from": "0/8:3", "to": "0/8:4", "reason": "discarded",
        }  # fmt: skip

        endpoint.refuses, endpoint.refusal = (lambda _messages: True), 503
        shop.until_in_files(shop.write(20))
        shop.until_left("hook", "its sink failed")
        known, lost_from = len(office.messages()), last
        service.until(
            "the end of the log to be known",
            "SELECT log_lsn >= pg_current_wal_lsn() - 4096 AND NOT EXISTS (SELECT FROM"
            " walbrook.consumers c WHERE c.name = 'files' AND c.cursor_lsn > log_lsn)"
            " FROM walbrook.sources",
        )
        assert "hook stands at" in office.walbrook("discard-all", "hook")
        endpoint.refuses = None
        until("the gap message", lambda: len(office.messages()) > known)
        last = shop.write(5)
        service.until_settled()
        gap, *others = office.messages()[known:]
        assert (gap["action"], gap["record"]["reason"]) == ("gap", "discarded")
        after = [message["record"]["id"] for message in others]
        assert after[-5:] == list(range(last - 4, last + 1))
        assert not set(after) & set(range(lost_from + 1, last - 4)), "it was given up"
        ((untold,),) = office.database.execute(
            "SELECT count(*) FROM walbrook.gaps WHERE told_at IS NULL"
        )
        assert untold == 0
        assert service.stop() == 0, service.log_tail()
    finally:
        service.kill()
