"""The table of docs/operations.md names every operation in its three ways, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from cdc.config import Config, Http
from cdc.service.cli.commands import COMMANDS, load_command
from cdc.service.http.api.routes import ApiRoute
from cdc.service.http.api.serve import Api
from tests.fix_postgres import Database

_PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
_TABLE = _PAGE[_PAGE.index("| operation | SQL |") :].partition("\n\n")[0]
_ROWS = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in _TABLE.splitlines()]
_OPERATIONS = _ROWS[2:]


def _config() -> Config:
    raise NotImplementedError("no request is made")


SETUP = {
    "run", "migrate", "config check", "config show", "init", "doctor", "import", "status", "log",
    "tail",
}  # fmt: skip
"""Commands that are about files and processes, and have no other way."""
PARTS = {"walbrook.config_answer()"}
"""Functions that are a part of an operation whose other function is in the table."""


@pytest.mark.migrated
def test_every_function_of_operators_is_in_the_table_and_is_there(database: Database) -> None:
    named = {sql for _, sql, *_ in _OPERATIONS if sql.endswith("()")}
    with database.connect() as state:
        functions = state.execute(
            "SELECT DISTINCT 'walbrook.' || p.proname || '()'"
            " FROM unnest(ARRAY['operator', 'values']) AS access, walbrook.functions_of(access) f"
            " JOIN pg_proc p ON p.oid = f"
        ).fetchall()
        tables = [sql for _, sql, *_ in _OPERATIONS if re.fullmatch(r"walbrook\.\w+", sql)]
        for table in tables:
            state.execute(f"SELECT FROM {table}".encode())
    assert named == {row[0] for row in functions} - PARTS | {"walbrook.trace()"}


def test_every_command_of_operators_is_in_the_table_and_is_there() -> None:
    named = {command.split(" --")[0] for _, _, command, *_ in _OPERATIONS}
    known = set()
    for name in COMMANDS.keys() - SETUP:
        held = getattr(load_command(name), "commands", None)
        known |= {name} if held is None else {f"{name} {each}" for each in held}
    assert named == known - SETUP


def test_every_route_of_operators_is_in_the_table_with_its_role() -> None:
    named = {(path, role) for _, _, _, path, role in _OPERATIONS}
    routes = {
        (f"{method} {re.sub(r':[a-z]+}', '}', route.path)}", route.role.name.lower())
        for route in Api(Http(), "", lambda name, deletes: None, _config).routes()
        if isinstance(route, ApiRoute) and route.role is not None
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert named == routes - {("GET /api/openapi.json", "read")}


def test_the_commands_are_those_of_the_group() -> None:
    from cdc.service.cli.entry import app

    assert set(getattr(get_command(app), "commands", {})) == set(COMMANDS)
