"""``GET /api/openapi.json``: the OpenAPI document, made from the routes themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.routing import BaseRoute

from cdc.service.http.api.routes import About, ApiRoute, Member
from cdc.version import VERSION

_PARAMETER: Final = re.compile(r"\{(\w+)(?::(\w+))?\}")
_PARAMETERS: Final = {
    "name": ("string", "A consumer or a source; database/consumer where several have one."),
    "id": ("integer", "As the listing shows it."),
    "act": ("string", "pause, resume, cancel, retry or skip."),
}
_ERRORS: Final = {
    "400": "The request makes no sense; field names what.",
    "401": "No token, or one that is not known.",
    "403": "The token may not do this.",
    "404": "There is no such thing.",
    "409": "It cannot be done as things are.",
    "413": "The body is too large.",
    "429": "Too many requests; Retry-After says when.",
    "503": "The state database does not answer.",
}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["what", "fix"],
            "properties": {
                "field": {"type": ["string", "null"]},
                "what": {"type": "string"},
                "fix": {"type": "string"},
            },
        }
    },
}


def document(routes: Iterable[BaseRoute]) -> dict[str, object]:
    """The OpenAPI 3.1 document of these routes."""
    paths: dict[str, dict[str, object]] = {}
    for route in routes:
        if isinstance(route, ApiRoute):
            path = _PARAMETER.sub(r"{\1}", route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Walbrook",
            "version": VERSION,
            "description": "What operators do, and what pull consumers fetch.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _ERROR},
        },
    }


def _operation(route: ApiRoute, path: str, method: str) -> dict[str, object]:
    about = route.about or About(path)
    role = "a token for this consumer" if route.role is None else f"role {route.role.name.lower()}"
    words = [word for word in re.split(r"\W+", path) if word and word != "api"]
    described: dict[str, object] = {
        "operationId": "_".join([method.lower(), *words]),
        "summary": about.summary,
        "description": f"Needs {role}.",
        "parameters": [
            *(_path_parameter(name) for name, _ in _PARAMETER.findall(route.path)),
            *(_query_parameter(*item) for item in about.query.items()),
        ],
        "responses": {
            "200": {
                "description": about.answer,
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
            **{status: _refused(text) for status, text in _ERRORS.items()},
        },
    }
    if method == "POST":
        described["requestBody"] = _body(about.body)
    return described


def _body(members: Mapping[str, Member]) -> dict[str, object]:
    required = [name for name, member in members.items() if member.required]
    schema: dict[str, object] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _schema(member) for name, member in members.items()},
    }
    if required:
        schema["required"] = required
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}


def _schema(member: Member) -> dict[str, object]:
    schema: dict[str, object] = {"type": member.type, "description": member.text}
    if member.type == "array":
        schema["items"] = {"type": "string"}
    if member.choices:
        schema["enum"] = list(member.choices)
    return schema


def _path_parameter(name: str) -> dict[str, object]:
    kind, text = _PARAMETERS[name]
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": text,
        "schema": {"type": kind},
    }


def _query_parameter(name: str, member: Member) -> dict[str, object]:
    return {
        "name": name,
        "in": "query",
        "required": member.required,
        "description": member.text,
        "schema": {key: value for key, value in _schema(member).items() if key != "description"},
    }


def _refused(text: str) -> dict[str, object]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
