"""What consumers that come later want of decode, beside what was wanted before."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding.format import ValueFormat, Wanted

FORMS = st.builds(
    ValueFormat,
    st.sampled_from(["iso8601", "unix_microsecond", "postgres"]),
    st.sampled_from(["number", "string"]),
)
WANTED = st.builds(
    Wanted,
    st.lists(FORMS, min_size=1, max_size=4, unique=True).map(tuple),
    before=st.booleans(),
    times=st.lists(st.sampled_from("abcd"), max_size=4, unique=True).map(tuple),
    keyed=st.booleans(),
    described=st.booleans(),
    texts=st.booleans(),
)


@given(WANTED, WANTED)
def test_a_view_for_what_was_wanted_before_is_right_on_what_is_decoded_for_more(
    before: Wanted, other: Wanted
) -> None:
    """The columns of a batch hold their own names."""
    wide = before.widened(other)
    changes, narrow = (_named(wanted.schema) for wanted in (wide, before))
    for form in before.formats:
        seen = before.view(changes, form, before.times).to_pydict()
        expected = before.view(narrow, form, before.times).to_pydict()
        assert {name: seen[name] for name in expected} == expected


@given(WANTED, WANTED)
def test_what_is_wanted_already_widens_nothing(before: Wanted, other: Wanted) -> None:
    wide = before.widened(other)
    assert wide.widened(before) == wide.widened(other) == wide
    assert set(other.schema.names) <= set(wide.schema.names) or len(other.formats) > 1


def _named(schema: pa.Schema) -> pa.RecordBatch:
    """One row, in which each text column has its own name."""
    columns = [
        pa.array([field.name if pa.types.is_string(field.type) else None], field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, names=schema.names)
