"""What a schema_change message says."""

from __future__ import annotations

import pytest

from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation, parse_relation, with_catalog
from cdc.decoding.schema_change import change_between, columns_of, same_table
from tests import pgoutput

ID, NOTE = ("id", 23, True), ("note", 25)


def table(
    *columns: pgoutput.ColumnSpec, name: str = "item", identity: str = "d", schema: str = "public"
) -> Relation:
    return parse_relation(pgoutput.relation(1, schema, name, columns, identity=identity))


def test_it_names_what_was_added_dropped_renamed_and_retyped() -> None:
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
def test_it_names_a_new_name_identity_or_key_and_nothing_else(
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
    message = pgoutput.relation(1, "public", "item", [ID, NOTE])
    keyed = [parse_relation(with_catalog(message, CatalogNote((name,)))) for name in ("id", "note")]
    assert same_table(parse_relation(message), keyed[0])
    assert not same_table(parse_relation(message), keyed[1])
    assert not same_table(table(ID, NOTE), table(ID, ("note", 1043)))


def test_a_type_that_is_not_built_in_is_called_by_its_number() -> None:
    assert columns_of(table(("mood", 16432)))[0]["type"] == "type 16432"
