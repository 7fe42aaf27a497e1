"""``/api/consumers/{name}/…`` and ``/api/sources/{name}/…`` for operators, and listings.

Thin layers over the functions of schema walbrook. Done is 200 with the consumer's new state; what
is refused is 400, 404 or 409 with what the function said. A consumer of several databases is named
``database/consumer``, its slash as it is or as ``%2F``. ``OPERATIONS`` is the one table of them:
the routes and the OpenAPI document are made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.connection import Connection
from cdc.service.http.api.bodies import Body, answer, field, malformed, only
from cdc.service.http.api.routes import About, Member, connected, guarded, json_body
from cdc.service.http.api.tokens import Access, Role
from cdc.state import operators
from cdc.state.listings import LISTED_MAX, Listing, listed
from cdc.state.operators import State

_LISTED: Final = 100  # rows, unless more are asked for

Act = Callable[[Connection, str, Body], object]


@dataclass(frozen=True)
class Operation:
    """An act or a listing; the role is that of its method unless it is given."""

    act: Act
    about: About
    method: Literal["GET", "POST"] = "POST"
    role: Role | None = None


def operator_routes(state_dsn: str, access: Access) -> list[Route]:
    """The routes for acts on consumers and sources."""

    def route(path: str, operation: Operation) -> Route:
        async def handler(request: Request) -> Response:
            reading = (
                dict(request.query_params)
                if operation.method == "GET"
                else await json_body(request)
            )
            only(reading, *operation.about.body, *operation.about.query)
            name = str(request.path_params.get("name", ""))
            return answer(await run_in_threadpool(act, operation.act, name, reading))

        return guarded(
            path,
            handler,
            access,
            methods=(operation.method,),
            operates=True,
            role=operation.role,
            about=operation.about,
        )

    def act(function: Act, name: str, body: Body) -> object:
        with connected(state_dsn) as connection:
            return function(connection, name, body)

    return [route(path, operation) for path, operation in OPERATIONS.items()]


def _pause(state: Connection, name: str, body: Body) -> State:
    return operators.pause(state, name)


def _resume(state: Connection, name: str, body: Body) -> State:
    return operators.resume(state, name)


def _accept_loss(state: Connection, name: str, body: Body) -> State:
    return operators.accept_loss(state, name)


def _rewind(state: Connection, name: str, body: Body) -> State:
    return operators.rewind(
        state,
        name,
        to_cursor=field(body, "to_cursor", str),
        to_time=field(body, "to_time", str),
        to_earliest=field(body, "to_earliest", bool) or False,
        destination=field(body, "destination", str),
    )


def _skip_to(state: Connection, name: str, body: Body) -> State:
    return operators.skip_to(state, name, _required(body, "cursor"))


def _advance_watermark(state: Connection, name: str, body: Body) -> State:
    to_time, source = field(body, "to_time", str), field(body, "source", str)
    return operators.advance_watermark(state, name, to_time, source)


def _set_partition_idle(state: Connection, name: str, body: Body) -> State:
    idle = field(body, "idle", bool)
    partition = field(body, "partition", str)
    return operators.set_partition_idle(state, name, partition, idle=idle is not False)


def _discard_all(state: Connection, name: str, body: Body) -> State:
    return operators.discard_all(state, name)


def _redeliver(state: Connection, name: str, body: Body) -> State:
    return operators.redeliver(state, name, field(body, "id", int))


def _discard(state: Connection, name: str, body: Body) -> State:
    return operators.discard(state, name, field(body, "id", int), field(body, "cursor", str))


def _finish_source(state: Connection, name: str, body: Body) -> State:
    source, finished = _required(body, "source"), field(body, "finished", bool)
    return operators.finish_source(state, name, source, finished=finished is not False)


def _forget(state: Connection, name: str, body: Body) -> State:
    return {"consumer": name, "forgotten": operators.forget(state, name)}


def _forget_source(state: Connection, name: str, body: Body) -> State:
    return {"source": name, "consumers": operators.forget_source(state, name)}


def _accept_gap(state: Connection, name: str, body: Body) -> dict[str, object]:
    return {"data": operators.accept_gap(state, name, _required(body, "lsn"))}


def _dead_letters(state: Connection, name: str, body: Body) -> dict[str, object]:
    return {"data": operators.dead_letters(state, name, _limit(body))}


def _listing(listing: Listing) -> Act:
    def listed_rows(state: Connection, name: str, body: Body) -> dict[str, object]:
        key = "action" if listing is Listing.AUDIT else "consumer"
        named = field(body, key, str)
        return {"data": listed(state, listing, name or named, _limit(body))}

    return listed_rows


def _limit(body: Body) -> int:
    limit = str(body.get("limit", _LISTED))
    most = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
    if not 1 <= most <= LISTED_MAX:
        raise malformed(f"limit is not a number from 1 to {LISTED_MAX}")
    return most


def _required(body: Body, name: str) -> str:
    value = field(body, name, str)
    if value is None:
        raise malformed(f"{name} is missing")
    return value


_STATE: Final = "The consumer's new state."
_LIMIT: Final = {"limit": Member("integer", f"At most so many rows, 1 to {LISTED_MAX}.")}
_OF_CONSUMER: Final = {"consumer": Member("string", "Of this consumer alone."), **_LIMIT}
_CURSOR: Final = "A cursor: 16/B374D848:3 or 97500059720:3."
_ON_CONSUMERS: Final = {
    "pause": Operation(_pause, About("Deliver nothing more until it is resumed.", answer=_STATE)),
    "resume": Operation(_resume, About("Serve a paused consumer again.", answer=_STATE)),
    "accept_loss": Operation(
        _accept_loss, About("Take note that its destination lost messages.", answer=_STATE)
    ),
    "rewind": Operation(
        _rewind,
        About(
            "Deliver everything again from an earlier place on.",
            {
                "to_cursor": Member("string", _CURSOR),
                "to_time": Member("string", "A time of commit."),
                "to_earliest": Member("boolean", "To the first change that the log has."),
                "destination": Member(
                    "string",
                    "What becomes of what the destination holds.",
                    choices=("new_generation", "truncate", "replace"),
                ),
            },
            answer=_STATE,
        ),
    ),
    "skip_to": Operation(
        _skip_to,
        About(
            "Move forward and give up what lies before.",
            {"cursor": Member("string", _CURSOR, required=True)},
            answer=_STATE,
        ),
    ),
    "advance_watermark": Operation(
        _advance_watermark,
        About(
            "Wait for nothing at or below a time, in event-time order.",
            {
                "to_time": Member("string", "The least the watermark is to be.", required=True),
                "source": Member("string", "Only for the tables of this database."),
            },
            answer="The watermark.",
        ),
    ),
    "set_partition_idle": Operation(
        _set_partition_idle,
        About(
            "Let a table hold the watermark back no more.",
            {
                "partition": Member("string", "The table, as schema.table.", required=True),
                "idle": Member("boolean", "False takes the mark back."),
            },
            answer=_STATE,
        ),
    ),
    "finish_source": Operation(
        _finish_source,
        About(
            "Say that a database of a consumer in event-time order has ended.",
            {
                "source": Member("string", "The database.", required=True),
                "finished": Member("boolean", "False: it counts again."),
            },
            answer="What was asked for.",
        ),
    ),
    "discard_all": Operation(
        _discard_all, About("Give up all that it has not had.", answer=_STATE)
    ),
    "redeliver": Operation(
        _redeliver,
        About(
            "Send dead letters again.",
            {"id": Member("integer", "Only this dead letter; all if not given.")},
            answer=_STATE,
        ),
    ),
    "discard": Operation(
        _discard,
        About(
            "Acknowledge dead letters, or give up a message that waits.",
            {
                "id": Member("integer", "Only this dead letter."),
                "cursor": Member("string", "The message that waits at this cursor."),
            },
            answer=_STATE,
        ),
    ),
    "forget": Operation(
        _forget,
        About("Remove a consumer that the configuration no longer names.", answer="How many."),
        role=Role.ADMIN,
    ),
    "dead_letters": Operation(
        _dead_letters,
        About("The changes that a consumer went on without.", query=_LIMIT),
        "GET",
        Role.OPERATE,  # their errors may quote rows
    ),
    "queue": Operation(
        _listing(Listing.QUEUE), About("The messages of a consumer that wait.", query=_LIMIT), "GET"
    ),
}
OPERATIONS: Final[dict[str, Operation]] = {
    # A path, because one of several databases is called database/consumer.
    **{f"/api/consumers/{{name:path}}/{each}": found for each, found in _ON_CONSUMERS.items()},
    "/api/consumers": Operation(
        _listing(Listing.SINKS), About("Sinks: state and counts.", query=_OF_CONSUMER), "GET"
    ),
    "/api/lag": Operation(
        _listing(Listing.LAG), About("How far all are behind.", query=_OF_CONSUMER), "GET"
    ),
    "/api/queue": Operation(
        _listing(Listing.QUEUE), About("Messages that wait.", query=_OF_CONSUMER), "GET"
    ),
    "/api/sources": Operation(
        _listing(Listing.SOURCES), About("Databases: reader, slot and log.", query=_LIMIT), "GET"
    ),
    "/api/sources/{name}/accept_gap": Operation(
        _accept_gap,
        About(
            "Move a source that has lost changes, and its consumers, to an LSN.",
            {"lsn": Member("string", "Where to go on.", required=True)},
            answer="The gaps.",
        ),
        role=Role.ADMIN,
    ),
    "/api/sources/{name}/forget": Operation(
        _forget_source,
        About("Remove a source that is not served any more.", answer="How many consumers."),
        role=Role.ADMIN,
    ),
    "/api/audit": Operation(
        _listing(Listing.AUDIT),
        About(
            "What operators did.",
            query={"action": Member("string", "Of this action alone."), **_LIMIT},
        ),
        "GET",
        Role.ADMIN,
    ),
}
"""By path."""
