"""The fast path and the exact path of every family say the same, of good texts and of damaged ones.

A value alone goes the fast way wherever it can. Beside an odd one the whole column goes the exact
way. What becomes of the value must not depend on its neighbours.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdc.decoding.columns import BadValuesError
from cdc.decoding.format import ValueFormat
from cdc.decoding.types import array as arrays
from cdc.decoding.types import composite
from tests.examples import examples
from tests.unit.decoding.columns_of import column, cut_out, json_of, outcomes
from tests.unit.decoding.damage import damaged
from tests.unit.decoding.models import MODELS

EXAMPLES = settings(
    max_examples=examples(15),
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_the_decoding_of_a_value_does_not_depend_on_its_neighbours(
    name: str, data: st.DataObject, seed: int
) -> None:
    model, choice = MODELS[name], random.Random(seed)
    samples = data.draw(st.lists(model.samples, min_size=1, max_size=5))
    texts: list[str | bytes | None] = [sample.text for sample in samples]
    texts += [damaged(sample.text.encode(), choice) for sample in samples]
    texts.append(None)
    choice.shuffle(texts)
    alone = [outcomes(model.form, column([text]))[0] for text in texts]
    assert outcomes(model.form, column(texts)) == alone
    assert outcomes(model.form, cut_out(texts)) == alone


@every_model
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_value_that_json_takes_the_typed_column_takes_too(
    name: str, data: st.DataObject, seed: int
) -> None:
    # Only a value that no number of its width holds is exact in JSON and refused when typed.
    model, choice = MODELS[name], random.Random(seed)
    texts = [damaged(data.draw(model.samples).text.encode(), choice) for _ in range(6)]
    for text, (json, typed) in zip(texts, outcomes(model.form, column(texts)), strict=True):
        if json is False and "jsonb" not in name and "bytea" not in name:
            assert typed is False, text


@EXAMPLES
@given(data=st.data())
@pytest.mark.parametrize("name", ["int4[]", "text[]", "timestamptz[]", "bytea[]"])
def test_arrays_that_can_be_cut_at_delimiters_are_read_exactly_the_same(
    name: str, data: st.DataObject
) -> None:
    samples = data.draw(st.lists(st.none() | MODELS[name].samples, max_size=5))
    texts = cut_out([None if sample is None else sample.text for sample in samples])
    fast = arrays._read_flat(texts, ",")
    exact = arrays.read_exactly(texts, ",")
    if fast is not None:
        assert fast.elements.equals(exact.elements)
        assert fast.bounds.tolist() == exact.bounds.tolist()
        assert fast.null.tolist() == exact.null.tolist()


@EXAMPLES
@given(data=st.data())
@pytest.mark.parametrize(("name", "fields"), [("pair", 2), ("single", 1), ("numbers", 2)])
def test_composites_that_can_be_cut_at_commas_are_read_exactly_the_same(
    name: str, fields: int, data: st.DataObject
) -> None:
    samples = data.draw(st.lists(st.none() | MODELS[name].samples, max_size=5))
    texts = cut_out([None if sample is None else sample.text for sample in samples])
    fast = composite._read_plain(texts, fields)
    exact, other = composite.read_exactly(texts, fields)
    assert not other.any()
    if fast is not None:
        assert [one.to_pylist() for one in fast[0]] == [one.to_pylist() for one in exact]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("int4", "9" * 5000),
        ("int8", "9223372036854775808"),
        ("int2", "-32769"),
        ("float8", "1e999"),
        ("float4", "1e+39"),
        ("numeric(10,2)", "NaN"),
        ("numeric(10,2)", "1.234"),
        ("numeric(10,2)", "+1"),
        ("numeric(10,2)", "01"),
        ("numeric(10,2)", ".5"),
        ("date", "0000-01-01"),
        ("date", "2026-02-29"),
        ("date", "2026-13-01 BC"),
        ("date", "2026-1-1"),
        ("timestamp", "2026-01-01 24:00:00"),
        ("timestamp", "2026-01-01 00:60:00"),
        ("timestamp", "2026-01-01 00:00"),
        ("timestamp", "2026-01-01T00:00:00"),
        ("timestamp", "294276-12-31 23:59:59.999999"),
        ("timestamptz", "2026-01-01 00:00:00"),
        ("timestamptz", "2026-01-01 00:00:00Z"),
        ("timestamptz", "2026-01-01 00:00:00+0530"),
        ("timestamptz", "0044-01-01 23:59:60+00 BC"),
        ("bytea", "\\x0"),
        ("bytea", "\\x0g"),
        ("bytea", "abc"),
        ("vector", "[1,NaN]"),
        ("vector", "[]"),
        ("hstore", '"a"=>b'),
        ("pair", "(1,2,3)"),
        ("int4[]", "{{1}}"),
    ],
)
def test_a_typed_column_refuses_what_its_type_cannot_hold_and_nothing_else(
    name: str, text: str
) -> None:
    form = MODELS[name].form
    with pytest.raises(BadValuesError) as caught:
        form.typed(column([None, text, None]))
    assert list(caught.value.faults) == [1]


def test_a_timestamp_beyond_64_bits_is_exact_in_unix_microseconds() -> None:
    texts = ["294276-12-31 23:59:59.999999+00", None, "infinity", "2026-01-01 00:00:00+00"]
    unix = ValueFormat("unix_microsecond")
    assert json_of(MODELS["timestamptz"].form, column(texts), unix) == [
        "9224318015999999999",
        None,
        '"infinity"',
        "1767225600000000",
    ]
