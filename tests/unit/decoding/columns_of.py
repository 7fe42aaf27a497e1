"""Columns of texts for tests: with nulls, cut out of larger ones, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from cdc.decoding.format import DEFAULT_FORMAT, ValueFormat
from cdc.decoding.rows import Faults
from cdc.decoding.types import TypeForm


def column(texts: Sequence[str | bytes | None]) -> pa.BinaryArray:
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    return pa.array(data, pa.binary())


def cut_out(texts: Sequence[str | bytes | None]) -> pa.BinaryArray:
    """The same as ``column``, but a slice from the middle of a larger array."""
    around: list[str | bytes | None] = ['{"\\(\n', None, "7"]
    return column([*around, *texts, *around]).slice(len(around), len(texts))


def json_of(
    form: TypeForm, texts: pa.BinaryArray, wanted: ValueFormat = DEFAULT_FORMAT
) -> list[str | None]:
    """The JSON of each value; every one of them must be good."""
    found = form.json(texts, wanted).whole()
    found.validate(full=True)
    assert found.type == pa.string()
    values: list[str | None] = found.to_pylist()
    return values


def typed_of(form: TypeForm, texts: pa.BinaryArray) -> list[Any]:
    """The Arrow value of each, as ``plain`` says it; every one of them must be good."""
    found = form.typed(texts)
    found.validate(full=True)
    assert found.type == form.arrow
    assert len(found) == len(texts)
    return [plain(value) for value in found]


def outcomes(form: TypeForm, texts: pa.BinaryArray) -> list[tuple[Any, Any]]:
    """Of each value its JSON and its Arrow value; False for one that is refused."""
    as_json, as_typed = Faults(), Faults()
    json = as_json.sound("v", texts, lambda them: form.json(them, DEFAULT_FORMAT).whole())
    typed = as_typed.sound("v", texts, form.typed)
    json.validate(full=True)
    typed.validate(full=True)
    return [
        (
            False if at in as_json.by_row else json[at].as_py(),
            False if at in as_typed.by_row else plain(typed[at]),
        )
        for at in range(len(texts))
    ]


def plain(value: pa.Scalar) -> Any:
    """An Arrow value as Python compares it exactly; moments are their numbers."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.MapScalar):
        return sorted(value.as_py())
    if isinstance(value, pa.ListScalar):
        return [plain(one) for one in value.values]
    if isinstance(value, pa.StructScalar):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, pa.TimestampScalar | pa.Date32Scalar):
        return value.value
    if isinstance(value, pa.FloatScalar | pa.DoubleScalar):
        return repr(value.as_py())
    return value.as_py()
