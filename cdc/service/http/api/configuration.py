"""``/api/config``: what runs; ``/api/config/plan`` and ``/api/config/apply`` for operators.

Thin layers over the functions of schema walbrook: the service reads the file that it was started
with. What is refused is 409 with the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.service.http.api.bodies import answer, field, malformed, only, refusal
from cdc.service.http.api.routes import About, Member, connected, guarded, json_body
from cdc.service.http.api.tokens import Access, Role
from cdc.state.configurations import request_config, running_config

_WAIT_S: Final = 60
_WAIT_S_MAX: Final = 600
_SOURCE: Final = Member("string", "A database of the service that is meant.")
_BODY: Final = {
    "source": _SOURCE,
    "partly": Member("boolean", "Leave out what needs a restart of the service."),
    "wait_s": Member("integer", "How long to wait for the service, in seconds: 60 if not given."),
}


def config_routes(state_dsn: str, access: Access) -> list[Route]:
    """The routes, for those who may do everything."""

    async def run(act: Callable[[Connection], object]) -> Response:
        def acted() -> object:
            with connected(state_dsn) as connection:
                return act(connection)

        try:
            return answer(await run_in_threadpool(acted))
        except OperatorError as error:
            raise refusal(error) from error

    async def running(request: Request) -> Response:
        source = request.query_params.get("source")
        return await run(lambda state: {"document": running_config(state, source)})

    async def asked(request: Request, action: str) -> Response:
        body = await json_body(request)

        def ask(state: Connection) -> object:
            only(body, *_BODY)
            source, partly = field(body, "source", str), bool(field(body, "partly", bool))
            wait_s = field(body, "wait_s", int) or _WAIT_S
            if not 1 <= wait_s <= _WAIT_S_MAX:
                raise malformed(f"wait_s is not a number from 1 to {_WAIT_S_MAX}")
            return request_config(state, action, source=source, partly=partly, wait_s=wait_s)

        return await run(ask)

    async def plan(request: Request) -> Response:
        return await asked(request, "plan")

    async def apply(request: Request) -> Response:
        return await asked(request, "apply")

    return [
        guarded(
            "/api/config",
            running,
            access,
            methods=("GET",),
            operates=True,
            role=Role.OPERATE,
            about=About(
                "The configuration as it runs, without secrets.", query={"source": _SOURCE}
            ),
        ),
        guarded(
            "/api/config/plan",
            plan,
            access,
            operates=True,
            about=About("What the file would change.", _BODY, answer="The request."),
        ),
        guarded(
            "/api/config/apply",
            apply,
            access,
            operates=True,
            role=Role.ADMIN,
            about=About("Run the file as it is now.", _BODY, answer="The request."),
        ),
    ]
