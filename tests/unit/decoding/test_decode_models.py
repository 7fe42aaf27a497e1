"""Every family against a model of it: what Postgres writes becomes exactly its value."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdc.decoding.format import ValueFormat
from tests.exact_json import Number, parse
from tests.examples import examples
from tests.unit.decoding.columns_of import column, cut_out, json_of, typed_of
from tests.unit.decoding.models import MODELS, Sample

EXAMPLES = settings(
    max_examples=examples(15),
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
FORMATS = [
    ValueFormat(timestamps, numbers)
    for timestamps in ("iso8601", "unix_microsecond", "postgres")
    for numbers in ("number", "string")
]

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@EXAMPLES
@given(data=st.data())
def test_a_column_becomes_what_its_values_stand_for(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    samples = data.draw(st.lists(st.none() | model.samples, max_size=8))
    texts = [None if sample is None else sample.text for sample in samples]
    for made in (column(texts), cut_out(texts)):
        found = json_of(model.form, made)
        assert [text and parse(text) for text in found] == [s and s.json for s in samples]
        assert typed_of(model.form, made) == [s and s.typed for s in samples]
    for wanted in FORMATS[1:]:
        found = json_of(model.form, column(texts), wanted)
        assert [text is None for text in found] == [text is None for text in texts]
        for text in found:
            parse(text or "null")


@every_model
@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("made", [column, cut_out])
def test_empty_columns_and_columns_of_nulls_stay_so(name: str, length: int, made: object) -> None:
    assert callable(made)
    texts = made([None] * length)
    for wanted in FORMATS:
        assert json_of(MODELS[name].form, texts, wanted) == [None] * length
    assert typed_of(MODELS[name].form, texts) == [None] * length


@every_model
def test_a_column_without_buffers_is_read(name: str) -> None:
    texts = pa.nulls(2, pa.binary())
    assert json_of(MODELS[name].form, texts) == [None, None]
    assert typed_of(MODELS[name].form, texts) == [None, None]


@pytest.mark.parametrize("name", ["timestamp", "timestamptz"])
@EXAMPLES
@given(data=st.data())
def test_unix_microseconds_are_the_typed_value(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    samples: list[Sample] = data.draw(st.lists(model.samples, min_size=1, max_size=5))
    found = json_of(model.form, column([s.text for s in samples]), ValueFormat("unix_microsecond"))
    assert [parse(str(text)) for text in found] == [
        s.text if "infinity" in s.text else Number(str(s.typed)) for s in samples
    ]


@pytest.mark.parametrize("name", ["timestamp", "timestamptz"])
@EXAMPLES
@given(data=st.data())
def test_timestamps_as_postgres_writes_them_are_its_text(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    texts = [s.text for s in data.draw(st.lists(model.samples, min_size=1, max_size=5))]
    found = json_of(model.form, column(texts), ValueFormat("postgres"))
    assert [parse(str(text)) for text in found] == texts


@pytest.mark.parametrize("name", ["int8", "numeric", "numeric(10,2)", "numeric(38,38)"])
@EXAMPLES
@given(data=st.data())
def test_numbers_as_strings_are_their_digits(name: str, data: st.DataObject) -> None:
    model = MODELS[name]
    texts = [s.text for s in data.draw(st.lists(model.samples, min_size=1, max_size=5))]
    found = json_of(model.form, column(texts), ValueFormat(numbers="string"))
    assert [parse(str(text)) for text in found] == texts
