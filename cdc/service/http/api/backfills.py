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

from cdc.connection import Connection, connect
from cdc.errors import OperatorError
from cdc.service.http.api.operators import Body, answer, field, malformed, only, refusal
from cdc.service.http.api.routes import guarded, json_body
from cdc.service.http.api.tokens import Access
from cdc.state.backfill_operators import backfills, change_backfill, known_act, start_backfill

_STATEMENT_S = 20
_TEXTS = ("where", "sort_column", "start_position")
_NUMBERS = ("chunk_bytes", "rows_per_second", "connections")


def backfill_routes(state_dsn: str, access: Access) -> list[Route]:
    """The routes, for those who may do everything."""

    async def run(act: Callable[[Connection], object]) -> Response:
        def connected() -> object:
            with connect(state_dsn, name="api", statement_s=_STATEMENT_S) as connection:
                return act(connection)

        try:
            return answer(await run_in_threadpool(connected))
        except OperatorError as error:
            raise refusal(error) from error

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
        guarded(where, start, access, methods=("POST",), operates=True),
        guarded(where, listed, access, methods=("GET",), operates=True),
        guarded("/api/backfills/{id:int}/{act}", change, access, operates=True),
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
