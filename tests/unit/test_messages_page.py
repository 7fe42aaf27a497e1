"""docs/messages.md says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cdc.change import ACTIONS, CHANGE_SCHEMA
from cdc.decoding.shapes import SHAPES, Context, shape_for
from tests.unit.decoding.changes_of_every_kind import changes_of_every_kind

PAGE = (Path(__file__).parents[2] / "docs" / "messages.md").read_text(encoding="utf-8")


def test_the_columns_are_those_of_the_schema() -> None:
    table = PAGE[PAGE.index("| column | Arrow type |") :]
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.MULTILINE)
    assert listed == [(field.name, str(field.type)) for field in CHANGE_SCHEMA]


def test_every_action_is_explained() -> None:
    table = PAGE[PAGE.index("| action | `record` |") : PAGE.index("A sink takes")]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == (*ACTIONS, "gap")


def test_every_shape_is_explained() -> None:
    section = PAGE[PAGE.index("## Shapes") : PAGE.index("## By action")]
    assert re.findall(r"^\*\*`(\w+)`\*\*", section, re.MULTILINE) == list(SHAPES)


def test_the_example_of_an_envelope_has_the_keys_of_one() -> None:
    shape = shape_for("debezium", Context("search", "shop", "localhost", "shop", now_ns=0))
    update = changes_of_every_kind().slice(2, 1)
    message = json.loads(shape.messages(shape.rows(update))[0].as_py())
    examples = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    (example,) = (example for example in examples if "op" in example)
    assert list(example) == list(message)
    assert list(example["source"]) == list(message["source"])


def test_the_examples_are_json() -> None:
    examples = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 8
    for example in examples:
        assert isinstance(json.loads(example), dict)
