"""How a route of the API is made: the token is checked, and a refusal becomes its JSON.

    guarded("/api/consumers/{name}/pause", pause, access)

where ``pause(request)`` is a coroutine that gives a ``Response`` or raises a ``RefusedError``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import orjson
import psycopg
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cdc.connection import Connection, connect
from cdc.errors import OperatorError
from cdc.service.http.api.bodies import refusal
from cdc.service.http.api.refusals import RefusedError, refused_by_sql
from cdc.service.http.api.tokens import Access, Role
from cdc.state.audit import ACTOR, Actor, Channel, identify

_logger = structlog.get_logger("walbrook.api")

_STATEMENT_S: Final = 20
BODY_BYTES_MAX = 4 << 20
"""Ten thousand ack ids take less than a megabyte."""

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Member:
    """A member of a request's body or of its query."""

    type: Literal["string", "integer", "number", "boolean", "array"]
    text: str
    required: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class About:
    """What the OpenAPI document says of a route."""

    summary: str
    body: Mapping[str, Member] = field(default_factory=dict)
    query: Mapping[str, Member] = field(default_factory=dict)
    answer: str = "What was found."


class ApiRoute(Route):
    """A route that knows what is said of it; ``role`` is empty where consumers' tokens serve."""

    about: About | None = None
    role: Role | None = None


def guarded(
    path: str,
    handler: Handler,
    access: Access,
    *,
    methods: Sequence[str] = ("POST",),
    operates: bool = False,
    role: Role | None = None,
    about: About | None = None,
) -> Route:
    """A route; where its path has a ``{name}``, that is the consumer the token must be for.

    Who ``operates`` needs a token for everything: one that may fetch a consumer's messages is not
    for moving or emptying it. Such a route needs at least ``role``: if not given, to read for GET
    and to operate for the others.
    """
    needed = role or (Role.READ if tuple(methods) == ("GET",) else Role.OPERATE)

    async def guard(request: Request) -> Response:
        try:
            name = request.path_params.get("name")
            client = "" if request.client is None else request.client.host
            actor = access.require(
                request.headers,
                None if operates else name,
                needed,
                client=client,
                limited=operates,
            )
            ACTOR.set(Actor(Channel.HTTP, actor or f"program on {client}"))
            if name is not None and "\0" in name:
                raise RefusedError(404, "no consumer has a zero byte in its name", field="consumer")
            return await handler(request)
        except RefusedError as refused:
            return refused.response()
        except OperatorError as error:
            return refusal(error).response()
        except psycopg.Error as error:
            answer = refused_by_sql(error)
            if answer.status == 503:
                _logger.warning("api.state", error=str(error).strip())
            return answer.response()

    route = ApiRoute(path, guard, methods=list(methods))
    route.about, route.role = about, needed if operates else None
    return route


@contextmanager
def connected(state_dsn: str) -> Iterator[Connection]:
    """The state database, where the acts of a request are those of its token."""
    with connect(state_dsn, name="api", statement_s=_STATEMENT_S) as connection:
        identify(connection)
        yield connection


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
