"""docs/messages.md says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cdc.change import ACTIONS, CHANGE_SCHEMA

PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text(encoding="utf-8")


def test_the_columns_are_those_of_the_schema() -> None:
    table = PAGE[PAGE.index("| column | Arrow type |") :]
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE)
    assert listed == [(field.name, str(field.type)) for field in CHANGE_SCHEMA]


def test_every_action_is_explained() -> None:
    table = PAGE[PAGE.index("| action |") : PAGE.index("A sink takes")]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == (*ACTIONS, "gap")


def test_the_examples_are_json() -> None:
    examples = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 5
    for example in examples:
        assert isinstance(json.loads(example), dict)
