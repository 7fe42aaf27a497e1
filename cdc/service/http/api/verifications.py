"""``/api/consumers/{name}/verifications`` and ``/api/verifications/{id}/cancel`` for operators.

Thin layers over the functions of schema walbrook: POST starts a verification or ends one, GET lists
them. What is refused is 400, 404 or 409 with what the function said. Keys of rows are not shown.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.connection import Connection
from cdc.service.http.api.bodies import answer, field, only
from cdc.service.http.api.routes import About, Member, connected, guarded, json_body
from cdc.service.http.api.tokens import Access
from cdc.state.verification_operators import (
    cancel_verification,
    start_verification,
    verifications,
)

_START = About(
    "Compare what a destination holds with its source.",
    {
        "table": Member("string", "As schema.table; all tables if not given."),
        "repair": Member("boolean", "Deliver rows that differ again."),
    },
    answer="The verification.",
)
_LIST = About("Verifications of a consumer, the latest first.")
_CANCEL = About("End a verification.", answer="The verification.")


def verification_routes(state_dsn: str, access: Access) -> list[Route]:
    """The routes, for those who may do everything."""

    async def run(act: Callable[[Connection], object]) -> Response:
        def in_thread() -> object:
            with connected(state_dsn) as connection:
                return act(connection)

        return answer(await run_in_threadpool(in_thread))

    async def start(request: Request) -> Response:
        name, body = str(request.path_params["name"]), await json_body(request)
        only(body, "table", "repair")
        table, repair = field(body, "table", str), field(body, "repair", bool)
        return await run(lambda state: start_verification(state, name, table, repair=bool(repair)))

    async def listed(request: Request) -> Response:
        name = str(request.path_params["name"])
        return await run(lambda state: {"data": verifications(state, name)})

    async def cancel(request: Request) -> Response:
        only(await json_body(request))
        number = int(request.path_params["id"])
        return await run(lambda state: cancel_verification(state, number))

    where = "/api/consumers/{name:path}/verifications"
    return [
        guarded(where, start, access, operates=True, about=_START),
        guarded(where, listed, access, methods=("GET",), operates=True, about=_LIST),
        guarded("/api/verifications/{id:int}/cancel", cancel, access, operates=True, about=_CANCEL),
    ]
