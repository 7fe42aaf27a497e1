"""``/api/consumers/{name}/…`` for operators: pause, resume, rewind, redeliver, discard and so on.

Thin layers over the functions of schema walbrook. Done is 200 with the consumer's new state; what
is refused is 400, 404 or 409 with what the function said. A consumer of several databases is named
``database/consumer``, its slash as it is or as ``%2F``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.connection import Connection, connect
from cdc.errors import OperatorError
from cdc.service.http.api.refusals import RefusedError
from cdc.service.http.api.routes import guarded, json_body
from cdc.service.http.api.tokens import Access
from cdc.state import operators
from cdc.state.operators import State

_STATUS = {"malformed": 400, "unknown": 404, "refused": 409}
_STATEMENT_S = 20
_LETTERS = 100  # that are listed unless more are asked for

T = TypeVar("T")
Body = Mapping[str, object]
Act = Callable[[Connection, str, Body], object]


def operator_routes(state_dsn: str, access: Access) -> list[Route]:
    """The routes, for those who may do everything."""

    def route(path: str, act: Act, method: str) -> Route:
        async def handler(request: Request) -> Response:
            reading = dict(request.query_params) if method == "GET" else await json_body(request)
            name = str(request.path_params["name"])
            try:
                return answer(await run_in_threadpool(_act, state_dsn, act, name, reading))
            except OperatorError as error:
                raise refusal(error) from error

        # A path, because one of several databases is called database/consumer.
        where = f"/api/consumers/{{name:path}}/{path}"
        return guarded(where, handler, access, methods=(method,), operates=True)

    acts = [route(path, act, "POST") for path, act in _ACTS.items()]
    return [*acts, route("dead_letters", _dead_letters, "GET")]


def _act(state_dsn: str, act: Act, name: str, body: Body) -> object:
    with connect(state_dsn, name="api", statement_s=_STATEMENT_S) as connection:
        return act(connection, name, body)


def _pause(state: Connection, name: str, body: Body) -> State:
    only(body)
    return operators.pause(state, name)


def _resume(state: Connection, name: str, body: Body) -> State:
    only(body)
    return operators.resume(state, name)


def _accept_loss(state: Connection, name: str, body: Body) -> State:
    only(body)
    return operators.accept_loss(state, name)


def _rewind(state: Connection, name: str, body: Body) -> State:
    only(body, "to_cursor", "to_time", "to_earliest", "destination")
    return operators.rewind(
        state,
        name,
        to_cursor=field(body, "to_cursor", str),
        to_time=field(body, "to_time", str),
        to_earliest=field(body, "to_earliest", bool) or False,
        destination=field(body, "destination", str),
    )


def _skip_to(state: Connection, name: str, body: Body) -> State:
    only(body, "cursor")
    cursor = field(body, "cursor", str)
    if cursor is None:
        raise malformed("cursor is missing: the first change to deliver")
    return operators.skip_to(state, name, cursor)


def _advance_watermark(state: Connection, name: str, body: Body) -> State:
    only(body, "to_time", "source")
    to_time, source = field(body, "to_time", str), field(body, "source", str)
    return operators.advance_watermark(state, name, to_time, source)


def _set_partition_idle(state: Connection, name: str, body: Body) -> State:
    only(body, "partition", "idle")
    idle = field(body, "idle", bool)
    partition = field(body, "partition", str)
    return operators.set_partition_idle(state, name, partition, idle=idle is not False)


def _discard_all(state: Connection, name: str, body: Body) -> State:
    only(body)
    return operators.discard_all(state, name)


def _redeliver(state: Connection, name: str, body: Body) -> State:
    only(body, "id")
    return operators.redeliver(state, name, field(body, "id", int))


def _discard(state: Connection, name: str, body: Body) -> State:
    only(body, "id", "cursor")
    return operators.discard(state, name, field(body, "id", int), field(body, "cursor", str))


def _dead_letters(state: Connection, name: str, body: Body) -> dict[str, object]:
    limit = str(body.get("limit", _LETTERS))
    most = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
    if not 1 <= most <= operators.LETTERS_MAX:
        raise malformed(f"limit is not a number from 1 to {operators.LETTERS_MAX}")
    return {"data": operators.dead_letters(state, name, most)}


_ACTS: dict[str, Act] = {
    "pause": _pause,
    "resume": _resume,
    "accept_loss": _accept_loss,
    "rewind": _rewind,
    "skip_to": _skip_to,
    "advance_watermark": _advance_watermark,
    "set_partition_idle": _set_partition_idle,
    "discard_all": _discard_all,
    "redeliver": _redeliver,
    "discard": _discard,
}


def only(body: Body, *known: str) -> None:
    """What is misspelt must not be taken for something else, such as all for one."""
    for name in body:
        if name not in known:
            raise malformed(f"{name} is not known here; known: {', '.join(known) or 'nothing'}")


def field(body: Body, name: str, kind: type[T]) -> T | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise malformed(f"{name} is not of type {kind.__name__}")
    return value


def malformed(what: str) -> OperatorError:
    return OperatorError(what, fix="docs/operations.md shows what can be sent", kind="malformed")


def refusal(error: OperatorError) -> RefusedError:
    """What a function refused, as the API says it."""
    return RefusedError(_STATUS.get(error.kind, 409), error.what, fix=error.fix)


def answer(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
