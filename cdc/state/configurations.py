"""The configuration that runs, and requests to change it, as rows of schema ``walbrook``.

Invariant: a document holds no secret; who stores one has taken them out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson
from psycopg.rows import dict_row

from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.state.operators import State, refusals

_OPEN: Final = ("waiting", "working")
_LOOK_S: Final = 5.0  # a statement has a bound of its own
CHANNEL: Final = "walbrook_config"

_STORE = """
INSERT INTO walbrook.configurations (sources, path, document, applied_by)
VALUES (%s, %s, %s, %s) RETURNING revision
"""
_FORGET = "DELETE FROM walbrook.configurations WHERE revision <= %s - 100"
_TAKEN = """
UPDATE walbrook.configurations SET taken_at = clock_timestamp()
 WHERE revision = %s AND taken_at IS NULL
"""
_IS_TAKEN = "SELECT taken_at IS NOT NULL FROM walbrook.configurations WHERE revision = %s"
_TAKE_REQUEST = """
UPDATE walbrook.config_requests SET state = 'working'
 WHERE id = (SELECT id FROM walbrook.config_requests
              WHERE state = 'waiting' AND source = ANY (%s::text[])
              ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING id, action, partly, asked_by
"""
_OWN_REQUEST = """
INSERT INTO walbrook.config_requests (action, source, asked_by) VALUES ('apply', %s, %s)
"""
_ANSWER = """
UPDATE walbrook.config_requests
   SET state = %s, revision = %s, changes = %s::jsonb, result = %s, fix = %s,
       answered_at = clock_timestamp()
 WHERE id = %s
"""
# What a process that has ended was asked: the file is what a start runs.
_GIVE_UP = """
UPDATE walbrook.config_requests
   SET state = 'refused', answered_at = clock_timestamp(),
       result = 'the service was started again before it answered: it runs the file as it was then',
       fix = 'look at what differs with walbrook config plan'
 WHERE state IN ('waiting', 'working') AND source = ANY (%s::text[])
"""
_REQUEST = {
    "plan": "SELECT walbrook.plan_config(%s, %s)",
    "apply": "SELECT walbrook.apply_config(%s, %s)",
}
_AWAIT = """
SELECT id, action, state, asked_by, asked_at, answered_at, revision, changes, result, fix
  FROM walbrook.config_answer(%s, make_interval(secs => %s))
"""
_RUNNING = "SELECT walbrook.running_config(%s)"


@dataclass(frozen=True)
class ConfigRequest:
    """What an operator asks of the running service."""

    id: int
    action: str  # plan or apply
    partly: bool
    asked_by: str


@dataclass(frozen=True)
class ConfigAnswer:
    """What became of a request; ``is_done`` is False if it was refused as a whole."""

    is_done: bool
    result: str
    fix: str = ""
    changes: Sequence[dict[str, object]] = ()
    revision: int | None = None


def store_configuration(
    connection: Connection, sources: Sequence[str], path: str, document: str, applied_by: str
) -> int:
    """Note what runs from now on. Returns its revision."""
    with connection.transaction():
        row = connection.execute(_STORE, (list(sources), path, document, applied_by)).fetchone()
        assert row is not None
        revision = int(str(row[0]))
        connection.execute(_FORGET, (revision,))
    return revision


def report_taken(connection: Connection, revision: int) -> None:
    """Every worker serves by this revision now."""
    connection.execute(_TAKEN, (revision,))


def is_taken(connection: Connection, revision: int) -> bool:
    row = connection.execute(_IS_TAKEN, (revision,)).fetchone()
    return row is not None and bool(row[0])


def give_up_requests(connection: Connection, sources: Sequence[str]) -> None:
    """Answer what an earlier process of the service was asked."""
    connection.execute(_GIVE_UP, (list(sources),))


def request_own(connection: Connection, source: str, asked_by: str) -> None:
    """The service asks itself to apply its file, so that this is on record too."""
    connection.execute(_OWN_REQUEST, (source, asked_by))


def take_request(connection: Connection, sources: Sequence[str]) -> ConfigRequest | None:
    """The oldest request for the service of these sources, if there is one."""
    row = connection.execute(_TAKE_REQUEST, (list(sources),)).fetchone()
    if row is None:
        return None
    return ConfigRequest(int(str(row[0])), str(row[1]), bool(row[2]), str(row[3]))


def answer_request(connection: Connection, request: int, answer: ConfigAnswer) -> None:
    state = "done" if answer.is_done else "refused"
    changes = orjson.dumps(list(answer.changes)).decode()
    connection.execute(
        _ANSWER, (state, answer.revision, changes, answer.result, answer.fix, request)
    )


def request_config(
    connection: Connection, action: str, *, source: str | None, partly: bool, wait_s: float
) -> State:
    """Ask the running service to plan or to apply its file. Returns its answer.

    OperatorError if it refuses, or does not answer within ``wait_s``.
    """
    deadline = time.monotonic() + wait_s
    with refusals():
        row = connection.execute(_REQUEST[action].encode(), (source, partly)).fetchone()
        assert row is not None
        rows = connection.cursor(row_factory=dict_row)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            answer = rows.execute(_AWAIT, (row[0], min(left_s, _LOOK_S))).fetchone()
            assert answer is not None
            if answer["state"] not in _OPEN or not left_s:
                break
    if answer["state"] == "refused":
        fix = str(answer["fix"] or "")
        raise OperatorError(str(answer["result"]), fix=fix, kind="refused")
    if answer["state"] != "done":
        raise OperatorError(
            f"the service has not answered request {answer['id']} in {wait_s:.0f} s",
            fix="see that it runs; SELECT * FROM walbrook.config_answer() shows the answer when it "
            "comes",
            kind="refused",
        )
    return answer


def running_config(connection: Connection, source: str | None) -> str:
    """The file as the service runs it, without its secrets."""
    with refusals():
        row = connection.execute(_RUNNING, (source,)).fetchone()
    if row is None or row[0] is None:
        raise OperatorError(
            "no service has run with this state database yet", fix="walbrook run", kind="unknown"
        )
    return str(row[0])


def listen(connection: Connection) -> None:
    connection.execute(f"LISTEN {CHANNEL}".encode())


def wait_for_request(connection: Connection, timeout_s: float) -> None:
    """Until a notification comes, or for so long."""
    for _ in connection.notifies(timeout=timeout_s, stop_after=1):
        pass
