"""The Relation message and the schemas that travel with a frame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding.catalog import CatalogNote
from cdc.decoding.raw import decode_schemas, encode_schemas
from cdc.decoding.relation import (
    Column,
    Relation,
    from_encoding,
    parse_relation,
    with_catalog,
)
from cdc.errors import DecodeError
from tests import pgoutput

MESSAGE = pgoutput.relation(
    16400, "Büro", "select", [("id", 23, True), ("a.b", 1043)], identity="i", typmod=14
)


def test_a_relation_is_read_whole() -> None:
    assert parse_relation(MESSAGE) == Relation(
        16400,
        "Büro",
        "select",
        "i",
        (Column("id", 23, 14, True), Column("a.b", 1043, 14, False)),
        key=(0,),
        key_noted=True,
    )


def test_an_empty_namespace_is_postgres_own_catalog() -> None:
    assert parse_relation(pgoutput.relation(1, "", "pg_x", [])).namespace == "pg_catalog"


@pytest.mark.parametrize("length", range(len(MESSAGE)))
def test_a_cut_relation_is_refused_at_every_byte(length: int) -> None:
    with pytest.raises(DecodeError, match="Relation message cannot be read"):
        parse_relation(MESSAGE[:length])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (MESSAGE + b"\0", "1 bytes follow its end"),
        (b"X" + MESSAGE[1:], "start with R"),
        (pgoutput.relation(1, "s", "t", [], identity="x"), "replica identity is 'x'"),
        (pgoutput.relation(1, "s", "t", [("a", 1), ("a", 2)]), "one name"),
        (pgoutput.relation(1, "s", "t", [("", 1)]), "column name is empty"),
        (pgoutput.relation(1, "s", "t", [("a", 1)]).replace(b"\0\1\0a", b"\0\1\7a"), "flags 7"),
        (MESSAGE.replace(b"a.b", b"a\xffb"), "not UTF-8"),
    ],
)
def test_an_impossible_relation_is_refused(message: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        parse_relation(message)


@given(st.dictionaries(st.integers(0, 2**64 - 1), st.binary(max_size=60), max_size=5))
def test_schemas_come_back_as_they_were(schemas: dict[int, bytes]) -> None:
    assert decode_schemas(encode_schemas(schemas)) == schemas


def test_damaged_schemas_are_refused_at_every_byte() -> None:
    data = encode_schemas({7: MESSAGE, 2**63: b"R"})
    for length in range(len(data)):
        with pytest.raises(DecodeError, match="schemas of a frame"):
            decode_schemas(data[:length])
    with pytest.raises(DecodeError, match="1 bytes follow"):
        decode_schemas(data + b"\0")


def test_a_schema_given_twice_is_refused() -> None:
    data = encode_schemas({7: b"R", 8: b"S"})
    twice = data.replace((8).to_bytes(8, "big"), (7).to_bytes(8, "big"))
    with pytest.raises(DecodeError, match="twice"):
        decode_schemas(twice)


def test_a_noted_key_is_read_back_in_its_order() -> None:
    message = pgoutput.relation(1, "public", "t", [("a", 23), ("b", 23), ("c", 25)], identity="f")
    assert parse_relation(with_catalog(message, CatalogNote(("c", "a")))).key == (2, 0)


def test_a_key_that_is_not_of_this_version_is_not_noted() -> None:
    message = pgoutput.relation(1, "public", "t", [("a", 23, True), ("b", 23)])
    assert with_catalog(message, CatalogNote(("gone",))) == message
    assert with_catalog(message, CatalogNote(("b",))) == message
    assert with_catalog(message, CatalogNote(("b", "a"))) == message
    assert with_catalog(message, CatalogNote()) == message
    assert parse_relation(message).key == (0,)


@pytest.mark.parametrize(
    "annex", [b"X", b"K", b"K\0\0", b"K\0\1\0\2", b"K\0\2\0\0\0\0", b"K\0\1\0\0!"]
)
def test_a_broken_key_is_refused(annex: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_relation(pgoutput.relation(1, "public", "t", [("a", 23), ("b", 23)]) + annex)


def test_a_message_in_another_encoding_is_kept_with_its_names_in_utf8() -> None:
    columns: list[pgoutput.ColumnSpec] = [("größe", 25, True), ("b", 23)]
    plain = pgoutput.relation(7, "büro", "stück", columns)
    names = ("größe", "büro", "stück")
    stored = plain
    for name in names:
        stored = stored.replace(name.encode(), name.encode("cp1252"))
    kept = with_catalog(from_encoding(stored, "cp1252"), CatalogNote(("größe",), (2, 1)))
    relation = parse_relation(kept)
    assert replace(relation, codec="") == parse_relation(
        with_catalog(plain, CatalogNote(("größe",), (2, 1)))
    )
    assert relation.codec == "cp1252"
    for length in range(len(stored)):
        with pytest.raises(DecodeError):
            from_encoding(stored[:length], "cp1252")
