"""What a schema_change message says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.decoding.catalog import CatalogNote, TypeNote
from cdc.decoding.relation import Relation, parse_relation, with_catalog
from cdc.decoding.schema_change import change_between, columns_of, same_table
from tests import pgoutput

ID, NOTE = ("id", 23, True), ("note", 25)


def table(
    *columns: pgoutput.ColumnSpec, name: str = "item", identity: str = "d", schema: str = "public"
) -> Relation:
    return parse_relation(pgoutput.relation(1, schema, name, columns, identity=identity))


def test_a_schema_change_names_added_dropped_renamed_and_retyped_columns() -> None:
    old = table(ID, ("a", 23), ("b", 23), NOTE)
    new = table(ID, ("a", 20), ("c", 23), ("total", 1700))
    assert change_between(old, new, 2) == {
        "version": 2,
        "table": {"schema": "public", "name": "item"},
        "columns": [
            {"name": "id", "type": "integer", "key": True},
            {"name": "a", "type": "bigint", "key": False},
            {"name": "c", "type": "integer", "key": False},
            {"name": "total", "type": "numeric", "key": False},
        ],
        "added": [{"name": "total", "type": "numeric"}],
        "dropped": [{"name": "note", "type": "text"}],
        "renamed": [{"from": "b", "to": "c"}],
        "retyped": [{"name": "a", "from": "integer", "to": "bigint"}],
    }


@pytest.mark.parametrize(
    ("new", "key", "value"),
    [
        (
            table(ID, NOTE, name="items", schema="shop"),
            "renamed_table",
            {
                "from": {"schema": "public", "name": "item"},
                "to": {"schema": "shop", "name": "items"},
            },
        ),
        (
            table(ID, NOTE, identity="f"),
            "replica_identity",
            {"from": "default", "to": "full"},
        ),
        (table(ID, ("note", 25, True)), "key", {"from": ["id"], "to": ["id", "note"]}),
    ],
)
def test_a_schema_change_names_a_new_name_identity_or_key_and_nothing_else(
    new: Relation, key: str, value: object
) -> None:
    change = change_between(table(ID, NOTE), new, 3)
    assert change[key] == value
    for other in {"renamed_table", "replica_identity", "key"} - {key}:
        assert other not in change
    assert [change[part] for part in ("added", "dropped", "renamed", "retyped")] == [[]] * 4


def test_a_key_whose_column_was_renamed_is_the_same_key() -> None:
    change = change_between(table(ID, NOTE), table(("uid", 23, True), NOTE), 2)
    assert change["renamed"] == [{"from": "id", "to": "uid"}]
    assert "key" not in change


def test_versions_are_compared_by_what_they_describe() -> None:
    message = pgoutput.relation(1, "public", "item", [ID, NOTE], identity="f")
    by_id, by_note = (
        parse_relation(with_catalog(message, CatalogNote((name,)))) for name in ("id", "note")
    )
    assert same_table(by_id, by_id)
    assert not same_table(by_id, by_note)


def test_a_key_that_the_catalog_could_not_say_is_no_change_of_it() -> None:
    message = pgoutput.relation(1, "public", "item", [ID, NOTE], identity="f")
    noted = parse_relation(with_catalog(message, CatalogNote(("note",))))
    assert same_table(noted, parse_relation(message))
    assert "key" not in change_between(noted, table(ID, NOTE, ("more", 25), identity="f"), 2)


def test_a_key_whose_order_is_not_known_is_compared_by_its_columns() -> None:
    message = pgoutput.relation(1, "public", "item", [("a", 23, True), ("b", 23, True), NOTE])
    ordered = parse_relation(with_catalog(message, CatalogNote(("b", "a"))))
    assert ordered.key == (1, 0)
    assert same_table(ordered, parse_relation(message))
    assert not same_table(ordered, table(("a", 23, True), ("b", 23), NOTE))


def test_a_type_that_is_not_built_in_is_called_by_its_number() -> None:
    assert columns_of(table(("mood", 16432)))[0]["type"] == "type 16432"


def numbered(relation: Relation, *attnums: int) -> Relation:
    return replace(relation, catalog=CatalogNote(attnums=attnums))


def test_a_column_that_was_dropped_and_added_again_is_distinguished_from_one_that_stayed() -> None:
    before, after = table(ID, NOTE), table(ID, NOTE)
    assert same_table(numbered(before, 1, 2), numbered(after, 1, 2))
    assert not same_table(numbered(before, 1, 2), numbered(after, 1, 3))
    change = change_between(numbered(before, 1, 2), numbered(after, 1, 3), 2)
    assert change["dropped"] == change["added"] == [{"name": "note", "type": "text"}]


def test_columns_that_swapped_their_names_were_renamed() -> None:
    before, after = table(ID, ("a", 25), ("b", 25)), table(ID, ("b", 25), ("a", 25))
    change = change_between(numbered(before, 1, 2, 3), numbered(after, 1, 2, 3), 2)
    assert change["renamed"] == [{"from": "a", "to": "b"}, {"from": "b", "to": "a"}]
    assert (change["added"], change["dropped"]) == ([], [])


def test_a_version_that_the_catalog_did_not_number_is_compared_by_names() -> None:
    assert same_table(table(ID, NOTE), numbered(table(ID, NOTE), 1, 7))


def test_types_that_are_not_built_in_are_called_as_the_catalog_calls_them() -> None:
    types = {
        16500: TypeNote(16500, "mood", "e"),
        16501: TypeNote(16501, "_mood", "b", element=16500),
    }
    relation = table(ID, ("m", 16500), ("ms", 16501), ("unknown", 16502))
    described = columns_of(replace(relation, catalog=CatalogNote(types=types)))
    assert [column["type"] for column in described] == ["integer", "mood", "mood[]", "type 16502"]


@pytest.mark.parametrize(("before", "after"), [((), ("id",)), (("id",), ())])
def test_a_key_that_came_or_went_is_a_change(
    before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    message = pgoutput.relation(1, "public", "item", [("id", 23), NOTE])
    old, new = (
        parse_relation(with_catalog(message, CatalogNote(key, (1, 2)))) for key in (before, after)
    )
    assert not same_table(old, new)
    change = change_between(old, new, 2)
    assert change["key"] == {"from": list(before), "to": list(after)}
