"""``/api/trace``: what became of one change; ``/api/live_traces``: what a sink makes of changes.

Values of rows are shown with ``payload=true`` and by live traces: both, like all of this, to
tokens that may operate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.config import Config
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.errors import OperatorError
from cdc.service.http.api.arguments import whole_number
from cdc.service.http.api.bodies import answer, field, malformed, only, refusal
from cdc.service.http.api.routes import About, Member, connected, guarded, json_body
from cdc.service.http.api.tokens import Access, Role
from cdc.state.operators import refusals
from cdc.state.traces import end_live_trace, fetch_samples, start_live_trace
from cdc.trace.change import KEYS_FOUND_MAX, RowKey, read_any_cursor
from cdc.trace.text import as_json
from cdc.trace.tracer import Tracer

_ASKED = ("source", "cursor", "key", "idempotency_key", "from", "limit", "payload")

_TRACE = About(
    "What became of a change, for every sink. Name it by one of cursor, key and idempotency_key.",
    query={
        "source": Member("string", "The database, if there are several."),
        "cursor": Member("string", "The cursor of the change, in either spelling."),
        "key": Member("string", "A row, as schema.table/key: its latest changes."),
        "idempotency_key": Member("string", "metadata.idempotency_key of a message."),
        "from": Member("string", "With key: no changes below this cursor."),
        "limit": Member("integer", "With key: the latest so many changes."),
        "payload": Member("boolean", "Show the row's values as well."),
    },
    answer="The changes, each with what became of it.",
)
_LIVE = About(
    "Begin to sample what a sink's expressions see and make of changes.",
    {
        "seconds": Member("integer", "For how long: 30 if not given."),
        "per_second": Member("integer", "At most so many changes per second: 10 if not given."),
    },
    answer="The id of the live trace.",
)
_SAMPLES = About("The samples of a live trace that were not fetched yet.")
_END = About("End a live trace.", answer="Nothing.")

Body = Mapping[str, object]
Act = Callable[[Connection, Request, Body], object]


def trace_routes(config: Callable[[], Config], state_dsn: str, access: Access) -> list[Route]:
    """The routes, for tokens that may operate."""

    def route(path: str, act: Act, method: str, about: About) -> Route:
        def run(request: Request, body: Body) -> object:
            with connected(state_dsn) as state, refusals():
                return act(state, request, body)

        async def handler(request: Request) -> Response:
            asked = dict(request.query_params)
            body = await json_body(request) if method == "POST" else asked
            try:
                return answer(await run_in_threadpool(run, request, body))
            except OperatorError as error:
                raise refusal(error) from error

        return guarded(
            path, handler, access, methods=(method,), operates=True, role=Role.OPERATE, about=about
        )

    return [
        route("/api/trace", lambda state, _, asked: _trace(config(), state, asked), "GET", _TRACE),
        route("/api/consumers/{name:path}/live_trace", _start, "POST", _LIVE),
        route("/api/live_traces/{id}", _fetch, "GET", _SAMPLES),
        route("/api/live_traces/{id}", _end, "DELETE", _END),
    ]


def _trace(config: Config, state: Connection, asked: Body) -> object:
    only(asked, *_ASKED)
    tracer = Tracer(config)
    source = tracer.source(field(asked, "source", str))
    given = {name: field(asked, name, str) for name in ("cursor", "key", "idempotency_key")}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        raise malformed("give one of cursor, key and idempotency_key")
    ((name, text),) = named.items()
    payload = asked.get("payload") == "true"
    return {
        "data": [
            as_json(tracer.trace(state, source, cursor), payload=payload)
            for cursor in _cursors(tracer, source, name, text, asked)
        ]
    }


def _cursors(tracer: Tracer, source: str, name: str, text: str, asked: Body) -> list[Cursor]:
    if name != "key":
        return [read_any_cursor(text)]
    limit = whole_number(asked, "limit", default=1, most=KEYS_FOUND_MAX)
    since = field(asked, "from", str)
    start = None if since is None else read_any_cursor(since)
    return [each.cursor for each in tracer.changes_of(source, RowKey.parse(text), limit, start)]


def _start(state: Connection, request: Request, body: Body) -> object:
    only(body, "seconds", "per_second")
    name = str(request.path_params["name"])
    seconds = field(body, "seconds", int) or 30
    per_second = field(body, "per_second", int) or 10
    return {"id": start_live_trace(state, name, seconds, per_second)}


def _fetch(state: Connection, request: Request, _: Body) -> object:
    samples = fetch_samples(state, str(request.path_params["id"]))
    return {"data": [orjson.Fragment(each) for each in samples]}


def _end(state: Connection, request: Request, _: Body) -> object:
    end_live_trace(state, str(request.path_params["id"]))
    return {"data": []}
