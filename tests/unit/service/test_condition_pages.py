"""Every condition that health can show has a section in the documentation, and no other has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.errors import OperatorError, TransientError
from cdc.replication.state_link import condition_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "operations.md"
# What the reader raises becomes a condition of the error's kind, and so does a fault of its slot.
READER = ("cdc/replication", "cdc/log", "cdc/state/fence.py")
ELSEWHERE = {"log_token"}  # only executors meet it


def trees(*places: str) -> Iterator[ast.Module]:
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else path.rglob("*.py"):
            yield ast.parse(file.read_text())


def constants(tree: ast.Module) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def made() -> set[str]:
    """The kinds of conditions that code makes by name."""
    found = set()
    for tree in trees("cdc", "sinks", "spark_pipeline"):
        named = constants(tree)
        for call in calls(tree):
            if isinstance(call.func, ast.Name) and call.func.id in ("Condition", "Fault"):
                first = call.args[0]
                if isinstance(first, ast.Constant):
                    found.add(str(first.value))
                elif isinstance(first, ast.Name) and first.id in named:
                    found.add(named[first.id])
    return found


def raised_by_the_reader() -> set[str]:
    return {
        str(keyword.value.value)
        for tree in trees(*READER)
        for call in calls(tree)
        for keyword in call.keywords
        if keyword.arg == "kind"
        and isinstance(keyword.value, ast.Constant)
        and not (isinstance(call.func, ast.Attribute) and "sort" in call.func.attr)
    } - {"stable"}


def without_a_kind() -> set[str]:
    """What the reader makes of errors that have no kind."""
    errors = (OperatorError("it cannot"), TransientError("it could not"), OSError("no"))
    return {condition_of(error).kind for error in errors}


def written_in_sql() -> set[str]:
    texts = [file.read_text() for file in (ROOT / "migrations" / "functions").glob("*.sql")]
    return {kind for text in texts for kind in re.findall(r"'(\w+)', '(?:warning|error)'", text)}


def sections() -> list[str]:
    return re.findall(r"^#### `(\w+)`$", PAGE.read_text(), re.MULTILINE)


def test_each_condition_has_its_section_and_no_section_is_left_over() -> None:
    shown = made() | raised_by_the_reader() | without_a_kind() | written_in_sql()
    assert set(sections()) == shown - ELSEWHERE
    assert len(sections()) == len(set(sections()))


@pytest.mark.parametrize("kind", sections())
def test_a_section_says_what_to_do(kind: str) -> None:
    _, _, rest = PAGE.read_text().partition(f"#### `{kind}`\n")
    text = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]
    assert len(text.split()) >= 10
