"""Every Postgres type, in one place: its Arrow type, its Spark type, its JSON; one module per
family.

Built-in types are known by their numbers (``builtin``). Others are what the source's catalog said
of them, as kept with the table version: an enum is its label, a domain its base type, a composite
an object, an extension's type what its module says. Whatever is not known is its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cdc.decoding.catalog import TypeNote
from cdc.decoding.types.array import array_of
from cdc.decoding.types.array_text import DELIMITERS, DIMENSIONS_MAX
from cdc.decoding.types.builtin import BOX_OID, ELEMENT_OF_ARRAY, NUMERIC_OID, RICHER
from cdc.decoding.types.composite import composite_of
from cdc.decoding.types.decimal import numeric
from cdc.decoding.types.form import JsonColumn, TypeForm
from cdc.decoding.types.hstore import HSTORE
from cdc.decoding.types.text import TEXT, text_json
from cdc.decoding.types.vector import VECTOR

__all__ = ["JsonColumn", "TypeForm", "text_json", "type_form"]

_DEPTH_MAX = 32
"""How deep types may nest; Postgres has no bound, but such types are not in use."""

_WORDS_MAX = 200_000
"""How long a type may be in the words of Spark. One with as many columns as a table may have is
shorter; a few types that each hold the last one twice would grow without end."""

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
) -> TypeForm:
    """What values of a column become; ``dimensions`` is how many an array column declares."""
    return _Forms(notes or {}).of(type_oid, typmod, dimensions)


@dataclass
class _Forms:
    """The types of some notes, each worked out once; one that is made of itself is its text."""

    notes: Mapping[int, TypeNote]
    _known: dict[tuple[int, int, int], TypeForm] = field(default_factory=dict)
    _within: list[int] = field(default_factory=list)  # that are being worked out

    def of(self, type_oid: int, typmod: int = -1, dimensions: int = 0) -> TypeForm:
        if type_oid == NUMERIC_OID:
            return numeric(typmod)
        if type_oid in RICHER:
            return RICHER[type_oid]
        if type_oid in ELEMENT_OF_ARRAY:
            element = ELEMENT_OF_ARRAY[type_oid]
            delimiter = ";" if element == BOX_OID else ","
            return array_of(self.of(element, typmod), delimiter, _declared(dimensions))
        note = self.notes.get(type_oid)
        if note is None or type_oid in self._within or len(self._within) == _DEPTH_MAX:
            return TEXT
        asked = (type_oid, typmod, dimensions)
        if asked not in self._known:
            self._within.append(type_oid)
            form = self._noted(note, typmod, dimensions)
            self._within.pop()
            self._known[asked] = form if len(form.spark) <= _WORDS_MAX else TEXT
        return self._known[asked]

    def _noted(self, note: TypeNote, typmod: int, dimensions: int) -> TypeForm:
        if note.kind == "d":
            return self.of(note.base, note.typmod, note.dimensions)
        if note.kind == "c":
            return composite_of([(name, self.of(oid, mod)) for name, oid, mod in note.fields])
        if note.element:
            element = self.notes.get(note.element)
            delimiter = element.delimiter if element is not None else ","
            if delimiter not in DELIMITERS:
                return TEXT
            return array_of(self.of(note.element, typmod), delimiter, _declared(dimensions))
        return _EXTENSION_TYPES.get((note.extension, note.name), TEXT)


def _declared(dimensions: int) -> int:
    """A column may declare more dimensions than any array can have, or none."""
    return min(max(1, dimensions), DIMENSIONS_MAX)
