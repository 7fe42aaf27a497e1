"""``/api/consumers/{name}/backfills`` and ``/api/backfills/{id}/…`` for operators.

Thin layers over the functions of schema walbrook: POST starts a backfill or changes one, GET lists
them. What is refused is 400, 404 or 409 with what the function said.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.connection import Connection
from cdc.service.http.api.bodies import Body, answer, field, malformed, only
from cdc.service.http.api.routes import About, Member, connected, guarded, json_body
from cdc.service.http.api.tokens import Access
from cdc.state.backfill_operators import backfills, change_backfill, known_act, start_backfill

_TEXTS = ("where", "sort_column", "start_position")
_NUMBERS = ("chunk_bytes", "rows_per_second", "connections")
_START = About(
    "Deliver the existing rows of a table.",
    {
        "table": Member("string", "As schema.table.", required=True),
        "where": Member("string", "Only rows for which this SQL expression is true."),
        "sort_column": Member("string", "Read rows in the order of this column."),
        "start_position": Member("string", "Only rows from this value of it on."),
        "chunk_bytes": Member("integer", "About how much of the table is read at once."),
        "rows_per_second": Member("integer", "Most rows delivered per second."),
        "connections": Member("integer", "Most chunks read at once."),
        "reload": Member("boolean", "Load the table beside the old one, then swap them."),
    },
    answer="The backfill.",
)
_LIST = About("Backfills of a consumer, the latest first.")
_CHANGE = About("Change a backfill.", answer="The backfill.")


def backfill_routes(state_dsn: str, access: Access) -> list[Route]:
    """The routes, for those who may do everything."""

    async def run(act: Callable[[Connection], object]) -> Response:
        def in_thread() -> object:
            with connected(state_dsn) as connection:
                return act(connection)

        return answer(await run_in_threadpool(in_thread))

    async def start(request: Request) -> Response:
        name, body = str(request.path_params["name"]), await json_body(request)
        return await run(lambda state: _start(state, name, body))

    async def listed(request: Request) -> Response:
        name = str(request.path_params["name"])
        return await run(lambda state: {"data": backfills(state, name)})

    async def change(request: Request) -> Response:
        only(await json_body(request))
        number, act = int(request.path_params["id"]), str(request.path_params["act"])
        return await run(lambda state: change_backfill(state, known_act(act), number))

    where = "/api/consumers/{name:path}/backfills"
    return [
        guarded(where, start, access, operates=True, about=_START),
        guarded(where, listed, access, methods=("GET",), operates=True, about=_LIST),
        guarded("/api/backfills/{id:int}/{act}", change, access, operates=True, about=_CHANGE),
    ]


def _start(state: Connection, name: str, body: Body) -> object:
    only(body, "table", "reload", *_TEXTS, *_NUMBERS)
    table = field(body, "table", str)
    if table is None:
        raise malformed("table is missing: whose existing rows are to be delivered")
    return start_backfill(
        state,
        name,
        table,
        where=field(body, "where", str),
        sort_column=field(body, "sort_column", str),
        start_position=field(body, "start_position", str),
        chunk_bytes=field(body, "chunk_bytes", int),
        rows_per_second=field(body, "rows_per_second", int),
        connections=field(body, "connections", int),
        reload=field(body, "reload", bool) or False,
    )
