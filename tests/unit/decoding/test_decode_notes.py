"""What the log keeps of the catalog: read back as it was, or refused."""

from __future__ import annotations

import random
import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding.catalog import CatalogNote, TypeNote, read_note, write_note
from cdc.decoding.plan import plan_for
from cdc.decoding.relation import parse_relation, with_catalog
from cdc.decoding.types import type_form
from cdc.decoding.types.text import TEXT
from cdc.errors import DecodeError
from tests import pgoutput
from tests.unit.decoding.damage import damaged_message
from tests.unit.decoding.everything import BARE, COLUMNS, NOTE, RELATION

SEED = 20260302
_OIDS = st.integers(0, 2**32 - 1)
_NAMES = st.text(st.characters(codec="utf-8"), max_size=9)
_FIELDS = st.lists(
    st.tuples(_NAMES, _OIDS, st.integers(-1, 2**31 - 1)), max_size=3, unique_by=lambda f: f[0]
)
_TYPES = st.builds(
    TypeNote,
    oid=_OIDS,
    name=_NAMES,
    kind=st.sampled_from("bcderm"),
    extension=_NAMES,
    element=_OIDS,
    delimiter=st.sampled_from(",;|"),
    base=_OIDS,
    typmod=st.integers(-1, 2**31 - 1),
    dimensions=st.integers(0, 9),
    fields=_FIELDS.map(tuple),
)


@given(st.lists(_TYPES, max_size=4), st.lists(st.integers(1, 1600), max_size=5))
def test_a_note_is_read_back_as_it_was(types: list[TypeNote], attnums: list[int]) -> None:
    note = CatalogNote(
        attnums=tuple(attnums),
        dimensions=tuple(1 for _ in attnums),
        types={one.oid: one for one in types},
    )
    written = write_note(note)
    assert (read_note(written, len(attnums)) if written else CatalogNote()) == note


def test_a_schema_without_a_note_is_read_as_before() -> None:
    relation = parse_relation(BARE)
    assert relation.catalog == CatalogNote()
    assert relation.attnums is None
    assert plan_for(BARE).types[12] is TEXT


def test_a_schema_has_its_note_back() -> None:
    relation = parse_relation(RELATION)
    assert relation.catalog.types == NOTE.types
    assert relation.attnums == NOTE.attnums
    assert relation.key == (0,)
    assert str(plan_for(RELATION).types[12].arrow) == 'struct<a: int32, b": string>'


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        {"attnums": [1]},
        {"dimensions": [1, 2]},
        {"attnums": "x"},
        {"types": [7]},
        {"types": [{}]},
        {"types": {"oid": 1}},
        {"types": [{"oid": [1], "name": "a", "kind": "b"}]},
        {"types": [{"oid": "1", "name": "a", "kind": "b"}]},
        {"types": [{"oid": 1, "name": ["a"], "kind": "b"}]},
        {"types": [{"oid": 1, "name": "a", "kind": "b", "element": [2]}]},
        {"types": [{"oid": 1, "name": "a", "kind": "b", "delimiter": 5}]},
        {"types": [{"oid": 1, "name": "a", "kind": "d", "typmod": "x"}]},
        {"types": [{"oid": 1, "name": "a", "kind": "d", "dimensions": None}]},
        {"types": [{"oid": 1, "name": "a", "kind": "c", "fields": [["a", 1]]}]},
        {"types": [{"oid": 1, "name": "a", "kind": "c", "fields": [["a", 1, 1], ["a", 1, 1]]}]},
        {"types": [{"oid": 1, "name": "a", "kind": "b", "new": 1}]},
    ],
)
def test_a_note_that_was_never_written_is_refused(content: object) -> None:
    with pytest.raises(DecodeError, match="catalog cannot be read"):
        read_note(orjson.dumps(content), columns=3)


def test_a_damaged_schema_is_refused_or_makes_a_plan() -> None:
    choice = random.Random(SEED)
    refused, cases = 0, 3000
    for _ in range(cases):
        try:
            plan_for(damaged_message(RELATION, choice))
        except DecodeError:
            refused += 1
    assert cases // 2 < refused < cases, f"seed {SEED}"


def test_a_note_with_other_values_in_it_is_refused_or_makes_a_plan() -> None:
    choice = random.Random(SEED)
    content = orjson.loads(write_note(NOTE))
    odd: list[object] = [
        None,
        -1,
        10**12,
        "",
        "x",
        [],
        {},
        1.5,
        True,
        20001,
        20002,
        [["a", 20007, -1]],
    ]
    for _ in range(3000):
        changed = orjson.loads(orjson.dumps(content))
        _replace(changed, choice, choice.choice(odd))
        data = orjson.dumps(changed)
        message = BARE + b"C" + len(data).to_bytes(4, "big") + data
        try:
            plan_for(message)
        except DecodeError:
            continue


def _replace(within: Any, choice: random.Random, value: object) -> None:
    """Put ``value`` at a random place of some JSON."""
    while True:
        key = choice.choice(list(within) if isinstance(within, dict) else range(len(within)))
        inside = within[key]
        if not isinstance(inside, dict | list) or not inside or choice.random() < 0.2:
            within[key] = value
            return
        within = inside


def test_types_made_of_themselves_are_text_in_the_end() -> None:
    notes = {
        1: TypeNote(1, "a", "d", base=1),
        2: TypeNote(2, "b", "c", fields=(("x", 2, -1), ("y", 3, -1))),
        3: TypeNote(3, "_b", "b", element=2),
    }
    notes |= {oid: TypeNote(oid, "chain", "d", base=oid + 1) for oid in range(20_000, 25_000)}
    for oid in (1, 2, 3, 20_000):
        assert type_form(oid, notes=notes).arrow is not None


def test_types_that_double_at_every_step_are_bounded() -> None:
    notes = {
        oid: TypeNote(oid, "t", "c", fields=(("l", oid + 1, -1), ("r", oid + 1, -1)))
        for oid in range(20_000, 20_031)
    }
    notes[20_031] = TypeNote(20_031, "t", "c", fields=(("v", 23, -1),))
    started = time.process_time()
    assert len(type_form(20_000, notes=notes).spark) < 1_000_000
    assert time.process_time() - started < 1


@pytest.mark.parametrize("declared", [0, 1, 7, 30_000])
def test_a_column_may_declare_more_dimensions_than_an_array_can_have(declared: int) -> None:
    form = type_form(1007, dimensions=declared)
    assert form.spark.count("array<") == min(max(declared, 1), 6)


def test_the_widest_composite_is_still_one() -> None:
    fields = tuple((f"{at:063}", 1700, (10 << 16 | 2) + 4) for at in range(1600))
    form = type_form(20_000, notes={20_000: TypeNote(20_000, "wide", "c", fields=fields)})
    assert form.arrow.num_fields == 1600


def test_a_note_is_for_as_many_columns_as_its_table_has() -> None:
    one = pgoutput.relation(1, "public", "t", COLUMNS[:1])
    with pytest.raises(DecodeError, match="not of 1 columns"):
        parse_relation(with_catalog(one, NOTE))
