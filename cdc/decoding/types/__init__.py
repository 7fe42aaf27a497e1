"""Every Postgres type, in one place: its Arrow type, its Spark type, its JSON; a module a family.

Built-in types are known by their numbers (``builtin``). Others are what the source's catalog said
of them, as kept with the table version: an enum is its label, a domain its base type, a composite
an object, an extension's type what its module says. Whatever is not known is its text.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdc.decoding.catalog import TypeNote
from cdc.decoding.types.array import array_of
from cdc.decoding.types.array_text import DELIMITERS
from cdc.decoding.types.builtin import BOX_OID, ELEMENT_OF_ARRAY, NUMERIC_OID, RICHER
from cdc.decoding.types.composite import composite_of
from cdc.decoding.types.decimal import numeric
from cdc.decoding.types.form import JsonColumn, TypeForm
from cdc.decoding.types.hstore import HSTORE
from cdc.decoding.types.text import TEXT, text_json
from cdc.decoding.types.vector import VECTOR

__all__ = ["JsonColumn", "TypeForm", "text_json", "type_form"]

_DEPTH_MAX = 32
"""How deep types may nest; Postgres has no bound, but nobody has such types."""

_EXTENSION_TYPES = {
    ("hstore", "hstore"): HSTORE,
    ("vector", "vector"): VECTOR,
    ("vector", "halfvec"): VECTOR,
}
"""By extension and name; citext, ltree, sparsevec and all others are their text."""


def type_form(
    type_oid: int,
    typmod: int = -1,
    *,
    notes: Mapping[int, TypeNote] | None = None,
    dimensions: int = 0,
    depth: int = 0,
) -> TypeForm:
    """What values of a column become; ``dimensions`` is how many an array column declares."""
    notes = notes or {}
    if type_oid == NUMERIC_OID:
        return numeric(typmod)
    if type_oid in RICHER:
        return RICHER[type_oid]
    if depth > _DEPTH_MAX:
        return TEXT
    if type_oid in ELEMENT_OF_ARRAY:
        element = ELEMENT_OF_ARRAY[type_oid]
        form = type_form(element, typmod, notes=notes, depth=depth + 1)
        return array_of(form, ";" if element == BOX_OID else ",", max(1, dimensions))
    note = notes.get(type_oid)
    return TEXT if note is None else _noted(note, typmod, notes, dimensions, depth + 1)


def _noted(
    note: TypeNote, typmod: int, notes: Mapping[int, TypeNote], dimensions: int, depth: int
) -> TypeForm:
    if note.kind == "d":
        return type_form(
            note.base, note.typmod, notes=notes, dimensions=note.dimensions, depth=depth
        )
    if note.kind == "c" and note.fields:
        return composite_of(
            [
                (name, type_form(oid, modifier, notes=notes, depth=depth))
                for name, oid, modifier in note.fields
            ]
        )
    if note.element:
        element = notes.get(note.element)
        delimiter = element.delimiter if element is not None else ","
        if delimiter not in DELIMITERS:
            return TEXT
        form = type_form(note.element, typmod, notes=notes, depth=depth)
        return array_of(form, delimiter, max(1, dimensions))
    return _EXTENSION_TYPES.get((note.extension, note.name), TEXT)
