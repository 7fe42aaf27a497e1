"""A table with a webhook and files behind it, in a running service: what arrives, what is shown."""

from __future__ import annotations

from typing import Any

from cdc.cursor import Cursor
from tests.fix_http import Endpoint
from tests.log_pipeline import arrived
from tests.waiting import until
from tests.walbrook_service import Service

_LIVE = "SELECT state = 'live' FROM walbrook.consumers WHERE name = '{consumer}'"
_REASON = "SELECT state_reason LIKE '{reason}%' FROM walbrook.consumers WHERE name = '{consumer}'"
_RUN = "SELECT run FROM walbrook.feeds"
_PAUSED = """
SELECT state = 'paused' AND state_reason = 'it is paused' FROM walbrook.consumers
 WHERE name = '{name}'
"""


class Shop:
    """Its table and its two sinks have names that begin with ``name``: a service may have many."""

    def __init__(self, service: Service, endpoint: Endpoint, name: str = "shop") -> None:
        self.service, self.database, self.endpoint = service, service.database, endpoint
        self.table, self.hook, self.files = f"{name}_item", f"{name}_hook", f"{name}_files"
        self._next = 1

    def write(self, rows: int) -> int:
        """Insert rows; the answer is the id of the last."""
        first, self._next = self._next, self._next + rows
        self.database.execute(
            f"INSERT INTO {self.table} SELECT i, 'n' "
            f"FROM generate_series({first}, {self._next - 1}) i"
        )
        return self._next - 1

    def in_files(self) -> list[int]:
        return [m["record"]["id"] for m in arrived(self.service.directory / self.files)]

    def messages(self) -> list[dict[str, Any]]:
        """What the webhook took."""
        return [m for request in self.endpoint.accepted for m in request.messages]

    def at_hook(self, since: int = 0) -> list[int]:
        return [message["record"].get("id") for message in self.messages()[since:]]

    def cursor_of(self, id_: int) -> str:
        """The cursor of the change that inserted a row."""
        for message in self.messages():
            if message["record"].get("id") == id_:
                at = message["metadata"]
                return str(Cursor(at["commit_lsn"], at["commit_idx"]))
        raise AssertionError(f"{id_} never arrived")

    def until_settled(self) -> None:
        """All that was committed so far, for these sinks."""
        self.service.until_settled(only=[self.hook, self.files])

    def until_in_files(self, last: int) -> None:
        until(f"{last} in the files", lambda: self.in_files() == list(range(1, last + 1)), 60)

    def until_live(self) -> None:
        """The webhook is served at the head of the log."""
        self.service.until(f"{self.hook} to be live", _LIVE.format(consumer=self.hook))

    def until_held(self, reason: str) -> None:
        """SQL says why the webhook is not live."""
        self.service.until(
            f"{self.hook} to be held: {reason}", _REASON.format(reason=reason, consumer=self.hook)
        )

    def until_paused(self) -> None:
        self.service.until("the pause", _PAUSED.format(name=self.hook))

    def until_slot_moved(self) -> None:
        """The slot passes what was just written, whoever has not had it.

        A message of our own says where that is: the end of WAL is passed with the next heartbeat.
        """
        ((lsn,),) = self.database.execute("SELECT pg_logical_emit_message(true, 'test', 'mark')")
        self.service.until(
            "the slot to move",
            f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots"
            f" WHERE slot_name = '{self.service.slot}'",
        )

    def until_healthy(self) -> None:
        until("health to be good again", lambda: self.health() == [])

    def health(self) -> list[str]:
        """The kinds of the webhook's health events; the other sink never has any."""
        found = self.database.execute(
            "SELECT consumer, kind FROM walbrook.health"
            f" WHERE consumer IN ('{self.hook}', '{self.files}')"
        )
        assert {consumer for consumer, _ in found} <= {self.hook}
        return [kind for _, kind in found]

    def run(self) -> int:
        """Which process of the service, counted from the first, serves the source."""
        ((run,),) = self.database.execute(_RUN)
        return int(run)

    def act(self, call: str) -> None:
        """Call a function of the schema walbrook."""
        self.database.execute(f"SELECT * FROM walbrook.{call}")

    def walbrook(self, *arguments: str) -> str:
        done = self.service.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


def shop_table(name: str = "shop") -> str:
    return f"CREATE TABLE {name}_item (id int PRIMARY KEY, name text)"


def shop_sinks(endpoint: Endpoint, name: str = "shop") -> list[dict[str, object]]:
    """The webhook first."""
    hook = {"type": "webhook", "url": endpoint.url, "max_retries": 0, "timeout_ms": 60000}
    only = {"include_tables": [f"public.{name}_item"]}
    return [
        {"name": f"{name}_hook", "source": only, "destination": hook, "partition_count": 1},
        {
            "name": f"{name}_files",
            "source": only,
            "destination": {"type": "file", "path": f"{name}_files"},
        },
    ]
