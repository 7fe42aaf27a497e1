"""hstore: a JSON object of strings, as its own cast to jsonb gives it; a map in Arrow."""

from __future__ import annotations

import re

import orjson
import pyarrow as pa

from cdc.decoding.columns import BadValuesError
from cdc.decoding.format import ValueFormat
from cdc.decoding.types.form import JsonColumn, TypeForm
from cdc.decoding.types.text import valid_utf8

# Possessive: what cannot match otherwise needs no memory of how it might.
_QUOTED = r'"((?:[^"\\]++|\\.)*+)"'
_PAIR = re.compile(f"{_QUOTED}=>(?:NULL|{_QUOTED})", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)

Pairs = list[tuple[str, str | None]]


def _json(texts: pa.BinaryArray, _form: ValueFormat) -> JsonColumn:
    objects = [
        None if pairs is None else orjson.dumps(dict(pairs)).decode() for pairs in _read(texts)
    ]
    return JsonColumn(pa.array(objects, pa.string()))


def _typed(texts: pa.BinaryArray) -> pa.MapArray:
    return pa.array(_read(texts), HSTORE.arrow)


def _read(texts: pa.BinaryArray) -> list[Pairs | None]:
    rows: list[Pairs | None] = []
    faults: dict[int, str] = {}
    for position, text in enumerate(valid_utf8(texts).to_pylist()):
        pairs = None if text is None else _pairs(text)
        if text is not None and pairs is None:
            faults[position] = "this hstore is malformed"
        rows.append(pairs)
    if faults:
        raise BadValuesError(faults)
    return rows


def _pairs(text: str) -> Pairs | None:
    pairs: Pairs = []
    at = 0
    while at < len(text):
        if pairs:
            if not text.startswith(", ", at):
                return None
            at += 2
        match = _PAIR.match(text, at)
        if match is None:
            return None
        key, value = match.groups()
        pairs.append(
            (_ESCAPED.sub(r"\1", key), None if value is None else _ESCAPED.sub(r"\1", value))
        )
        at = match.end()
    return pairs


HSTORE = TypeForm(pa.map_(pa.string(), pa.string()), "map<string,string>", _json, _typed)
