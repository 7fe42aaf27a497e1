"""The rooms: what imports what, how much a module knows, and how long it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "cdc": {"cdc", "migrations"},
    "demo": {"demo", "cdc"},
    "sinks": {"sinks", "cdc"},
    "spark_pipeline": {"spark_pipeline", "sinks", "cdc"},
    "walbrook": {"walbrook", "cdc", "sinks", "spark_pipeline"},
    "pyspark_walbrook": {"pyspark_walbrook", "spark_pipeline"},
    "migrations": {"migrations"},
}
# The command line starts the demo; nothing else knows it.
ABOVE_ALL = "cdc.service.cli."

WITHOUT_SPARK = ("capacity", "delivery", "slices")
"""Rooms of spark_pipeline that are tested without a JVM."""

# Cycles that are still there. Only removals: a backfill reads through the replication room, whose
# reader writes state rows, and the rows of a backfill's chunks hold its ranges and snapshots.
CYCLES = {frozenset({"cdc.backfill", "cdc.replication", "cdc.state"})}

IMPORTS_MAX = 20
# Modules that know more of ours than that, and how many. Only smaller numbers, and removals.
MORE_IMPORTS = {
    "cdc.replication.reader": 24,
    "sinks.lakehouse.sink": 21,
    "sinks.postgres.sink": 21,
    "spark_pipeline.delivery.deliver": 24,
    "spark_pipeline.eventtime.ordering": 30,
    "spark_pipeline.feed.cluster": 21,
    "spark_pipeline.stage.feed_runner": 21,
    "spark_pipeline.stage.stage": 36,
    "spark_pipeline.stage.worker": 33,
    "spark_pipeline.verify.comparison": 22,
}
LINES_MAX = 500


@cache
def modules() -> dict[str, Path]:
    found = {}
    for room in ALLOWED:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports but those for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            yield from statements(node)


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names, with those that are imported from a module."""
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert not node.level, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def ours(module: str) -> frozenset[str]:
    """The modules of the project that a module imports."""
    found = set()
    for name in imports(modules()[module]):
        if name in modules():
            found.add(name)
        elif name.rpartition(".")[0] in modules():
            found.add(name.rpartition(".")[0])
    return frozenset(found - {module})


def rooms_of(names: frozenset[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for module, path in modules().items():
        if module.partition(".")[0] == room:
            known = rooms_of(imports(path)) & {*ALLOWED, "tests", "benchmarks"}
            allowed = ALLOWED[room] | ({"demo"} if module.startswith(ABOVE_ALL) else set())
            assert known <= allowed, f"{module} imports {known - allowed}"


def test_pyspark_is_imported_in_its_room_alone() -> None:
    for module, path in modules().items():
        if not module.startswith("spark_pipeline"):
            assert not rooms_of(imports(path)) & {"pyspark", "py4j"}, module


@pytest.mark.parametrize("room", WITHOUT_SPARK)
def test_a_room_that_needs_no_spark_does_not_load_it(room: str) -> None:
    waiting = [name for name in modules() if name.startswith(f"spark_pipeline.{room}.")]
    seen = set(waiting)
    assert waiting
    while waiting:
        module = waiting.pop()
        assert not rooms_of(imports(modules()[module])) & {"pyspark", "py4j"}, module
        waiting += ours(module) - seen
        seen |= ours(module)


def test_spark_pipeline_has_no_modules_outside_its_rooms() -> None:
    flat = {path.name for path in (ROOT / "spark_pipeline").glob("*.py")}
    assert flat == {"__init__.py", "__main__.py"}


def child(package: str, module: str) -> str | None:
    """The module or the room right below ``package`` that ``module`` is, or is in."""
    if not module.startswith(f"{package}."):
        return None
    return f"{package}.{module[len(package) + 1 :].partition('.')[0]}"


def cycles(package: str) -> set[frozenset[str]]:
    """What is right below a package and reaches itself through what stands beside it."""
    edges: dict[str, set[str]] = {}
    for module in modules():
        if (start := child(package, module)) is not None:
            ends = {child(package, name) for name in ours(module)} - {start, None}
            edges.setdefault(start, set()).update(end for end in ends if end is not None)
    reached: dict[str, set[str]] = {}
    for start in edges:
        waiting: list[str] = [start]
        seen: set[str] = set()
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reached[start] = seen
    return {
        frozenset(other for other in reached[start] if start in reached.get(other, ()))
        for start in edges
        if start in reached[start]
    }


def test_modules_beside_each_other_are_imported_one_way() -> None:
    packages = {module.rpartition(".")[0] for module in modules()} - {""}
    assert set().union(*map(cycles, packages)) == CYCLES


def test_no_module_knows_more_than_twenty_others() -> None:
    many = {name: len(ours(name)) for name in modules() if len(ours(name)) > IMPORTS_MAX}
    assert many == MORE_IMPORTS, "a number may only shrink; write the smaller one down"


def test_no_module_is_past_five_hundred_lines() -> None:
    for module, path in modules().items():
        assert len(path.read_text().splitlines()) <= LINES_MAX, module


def test_a_class_name_means_one_class() -> None:
    places: dict[str, list[str]] = {}
    for room in (*ALLOWED, "benchmarks"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice
