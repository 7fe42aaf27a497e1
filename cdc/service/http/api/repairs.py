"""``/api/sources/{name}/repairs`` for operators: POST begins a repair, GET lists them.

What is refused is 400, 404 or 409 with the reason and the fix.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.errors import TransientError
from cdc.service.http.api.bodies import answer, field, malformed, only
from cdc.service.http.api.refusals import RefusedError
from cdc.service.http.api.routes import About, Member, connected, guarded, json_body
from cdc.service.http.api.tokens import Access, Role
from cdc.state.operators import State
from cdc.state.repairs import Deletes, repaired_tables, repairs

_START = About(
    "Bridge what a lost slot has lost.",
    {
        "deletes": Member(
            "string", "How rows deleted meanwhile are found.", choices=("find", "skip")
        )
    },
    answer="The repair.",
)
_LIST = About("Repairs of a source, the latest first.")

BeginRepair = Callable[[str, Deletes], object]
"""Begins the repair of a source; see ``cdc.service.process.repair``."""


def repair_routes(state_dsn: str, access: Access, begin: BeginRepair) -> list[Route]:
    """The routes, for those who may do everything."""

    def listed(name: str) -> list[State]:
        with connected(state_dsn) as state:
            return [
                {**each, "of_tables": repaired_tables(state, int(str(each["id"])))}
                for each in repairs(state, name)
            ]

    async def start(request: Request) -> Response:
        body = await json_body(request)
        only(body, "deletes")
        wanted = field(body, "deletes", str) or "find"
        deletes: Deletes
        if wanted == "find":
            deletes = "find"
        elif wanted == "skip":
            deletes = "skip"
        else:
            raise malformed("deletes has to be find or skip")
        name = str(request.path_params["name"])
        try:
            await run_in_threadpool(begin, name, deletes)
        except TransientError as error:
            raise RefusedError(409, error.what, fix=error.fix) from error
        (latest, *_) = await run_in_threadpool(listed, name)
        return answer(latest)

    async def shown(request: Request) -> Response:
        return answer({"data": await run_in_threadpool(listed, str(request.path_params["name"]))})

    where = "/api/sources/{name}/repairs"
    return [
        guarded(where, start, access, operates=True, role=Role.ADMIN, about=_START),
        guarded(where, shown, access, methods=("GET",), operates=True, about=_LIST),
    ]
