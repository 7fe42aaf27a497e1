"""The OpenAPI document says exactly what is served."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.routing import BaseRoute

from cdc.config import Http
from cdc.service.http.api.openapi import document
from cdc.service.http.api.routes import ApiRoute
from cdc.service.http.api.serve import Api

Document = dict[str, Any]


@pytest.fixture(scope="module")
def routes() -> list[BaseRoute]:
    return Api(Http(), "", lambda name, deletes: None).routes()


@pytest.fixture(scope="module")
def described(routes: list[BaseRoute]) -> Document:
    return document(routes)


def test_every_route_is_described_and_nothing_else(
    routes: list[BaseRoute], described: Document
) -> None:
    served = {
        (re.sub(r":\w+\}", "}", route.path), method.lower())
        for route in routes
        if isinstance(route, ApiRoute)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert len(served) > 30
    assert served == {
        (path, method) for path, item in described["paths"].items() for method in item
    }
    assert all(isinstance(route, ApiRoute) for route in routes), "all are guarded"
    assert not [r.path for r in routes if isinstance(r, ApiRoute) and r.about is None]


def operations(described: Document) -> list[tuple[str, str, Document]]:
    return [
        (path, method, operation)
        for path, item in described["paths"].items()
        for method, operation in item.items()
    ]


def test_the_document_keeps_the_rules_of_openapi(described: Document) -> None:
    assert described["openapi"] == "3.1.0"
    assert {"title", "version"} <= described["info"].keys()
    ids = [operation["operationId"] for _, _, operation in operations(described)]
    assert len(ids) == len(set(ids)), "operation ids are unique"
    for path, method, operation in operations(described):
        named = set(re.findall(r"\{(\w+)\}", path))
        parameters = operation["parameters"]
        assert {each["name"] for each in parameters if each["in"] == "path"} == named, path
        assert all(each["required"] for each in parameters if each["in"] == "path"), path
        assert len({(each["name"], each["in"]) for each in parameters}) == len(parameters), path
        assert all("description" in answer for answer in operation["responses"].values()), path
        assert ("requestBody" in operation) is (method == "post"), path
        for schema in _schemas(operation):
            assert schema.get("type", schema.get("$ref")) is not None, path
            assert set(schema.get("required", ())) <= schema.get("properties", {}).keys(), path
        for reference in re.findall(r"#/components/schemas/\w+", str(operation)):
            assert reference.rpartition("/")[2] in described["components"]["schemas"]


def _schemas(value: object) -> list[Document]:
    """Every schema below an operation."""
    if isinstance(value, list):
        return [schema for each in value for schema in _schemas(each)]
    if not isinstance(value, dict):
        return []
    own = [value["schema"]] if isinstance(value.get("schema"), dict) else []
    return own + [schema for each in value.values() for schema in _schemas(each)]


def test_what_needs_which_role_is_said(described: Document) -> None:
    def said(path: str, method: str) -> str:
        return str(described["paths"][path][method]["description"])

    assert said("/api/sources", "get") == "Needs role read."
    assert said("/api/consumers/{name}/pause", "post") == "Needs role operate."
    assert said("/api/consumers/{name}/dead_letters", "get") == "Needs role operate."
    assert said("/api/sources/{name}/repairs", "post") == "Needs role admin."
    assert said("/api/audit", "get") == "Needs role admin."
    assert said("/api/consumers/{name}/receive", "post") == "Needs a token for this consumer."
