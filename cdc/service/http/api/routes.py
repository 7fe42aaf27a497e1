"""How a route of the API is made: the token is checked, and a refusal becomes its JSON.

    guarded("/api/consumers/{name}/pause", pause, access)

where ``pause(request)`` is a coroutine that gives a ``Response`` or raises a ``RefusedError``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import orjson
import psycopg
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.service.http.api.refusals import RefusedError, refused_by_sql
from cdc.service.http.api.tokens import Access

_logger = structlog.get_logger("walbrook.api")

BODY_BYTES_MAX = 4 << 20
"""Ten thousand ack ids take less than a megabyte."""

Handler = Callable[[Request], Awaitable[Response]]


def guarded(
    path: str,
    handler: Handler,
    access: Access,
    *,
    methods: Sequence[str] = ("POST",),
    operates: bool = False,
) -> Route:
    """A route; where its path has a ``{name}``, that is the consumer the token must be for.

    Who ``operates`` needs a token for everything: one that may fetch a consumer's messages is not
    for moving or emptying it.
    """

    async def guard(request: Request) -> Response:
        try:
            name = request.path_params.get("name")
            access.require(request.headers, None if operates else name)
            if name is not None and "\0" in name:
                raise RefusedError(404, "no consumer has a zero byte in its name", field="consumer")
            return await handler(request)
        except RefusedError as refused:
            return refused.response()
        except psycopg.Error as error:
            answer = refused_by_sql(error)
            if answer.status == 503:
                _logger.warning("api.state", error=str(error).strip())
            return answer.response()

    return Route(path, guard, methods=list(methods))


async def json_body(request: Request) -> dict[str, object]:
    """The members of the request's JSON; none for an empty body."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                raise RefusedError(
                    413,
                    f"the request is larger than {BODY_BYTES_MAX} bytes",
                    fix="send it in several requests",
                )
    except ClientDisconnect:
        raise RefusedError(400, "the request ended in the middle", fix="send it again") from None
    if not body.strip():
        return {}
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise RefusedError(400, "the body is not JSON", fix="send a JSON object") from None
    if not isinstance(read, dict):
        raise RefusedError(400, "the body is not a JSON object", fix="send a JSON object")
    return read
