"""What the routes of operators read from a body, and how they answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import orjson
from starlette.responses import Response

from cdc.errors import OperatorError
from cdc.service.http.api.refusals import RefusedError

_STATUS: Final = {"malformed": 400, "unknown": 404, "refused": 409}

T = TypeVar("T")
Body = Mapping[str, object]


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
    return Response(orjson.dumps(content, default=str), media_type="application/json")
