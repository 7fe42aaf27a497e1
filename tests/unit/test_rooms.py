"""The import arrows run one way, and Spark stays in its room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "cdc": {"cdc", "migrations"},
    "sinks": {"sinks", "cdc"},
    "spark_pipeline": {"spark_pipeline", "sinks", "cdc"},
    "walbrook": {"walbrook", "cdc", "sinks", "spark_pipeline"},
    "pyspark_walbrook": {"pyspark_walbrook", "spark_pipeline"},
    "migrations": {"migrations"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        ours = imports(path) & {*ALLOWED, "tests", "benchmarks", "examples"}
        assert ours <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {ours - ALLOWED[room]}"


def test_pyspark_is_imported_in_its_room_alone() -> None:
    for room in ("cdc", "sinks", "migrations"):
        for path in (ROOT / room).rglob("*.py"):
            assert "pyspark" not in imports(path), path


@pytest.mark.parametrize("room", ["delivery", "capacity"])
def test_delivery_and_capacity_need_no_spark(room: str) -> None:
    for path in (ROOT / "spark_pipeline" / room).rglob("*.py"):
        assert not imports(path) & {"pyspark", "py4j"}, path


def test_spark_pipeline_has_no_modules_outside_its_rooms() -> None:
    flat = {path.name for path in (ROOT / "spark_pipeline").glob("*.py")}
    assert flat == {"__init__.py", "__main__.py"}


def test_no_module_is_past_five_hundred_lines() -> None:
    for room in ALLOWED:
        for path in (ROOT / room).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path
