"""Lines of COPY text as raw rows: the same bytes that an insert of the row would bring."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.backfill.copy_rows import columns_of, raw_rows
from tests import pgoutput

_ESCAPED = {
    "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v"
}  # fmt: skip
_TEXTS = st.none() | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\\\n\tN"),
    max_size=8,
)


def line(values: list[str | None]) -> bytes:
    """As Postgres writes a row, one value after another."""
    cells = [
        "\\N" if value is None else "".join(_ESCAPED.get(each, each) for each in value)
        for value in values
    ]
    return "\t".join(cells).encode() + b"\n"


@given(st.integers(1, 4).flatmap(lambda width: st.lists(
    st.lists(_TEXTS, min_size=width, max_size=width), max_size=20)))  # fmt: skip
def test_rows_become_the_messages_of_inserts(rows: list[list[str | None]]) -> None:
    width = len(rows[0]) if rows else 3
    columns = columns_of(b"".join(map(line, rows)), width)
    assert [column.to_pylist() for column in columns] == [
        [None if row[at] is None else row[at].encode() for row in rows]  # type: ignore[union-attr]
        for at in range(width)
    ]
    raw = raw_rows(columns, oid=7, schema_id=9, read_us=5)
    raw.validate(full=True)
    expected = [b"R" + pgoutput.insert(7, row)[1:] for row in rows]
    assert raw.column("payload").to_pylist() == expected


def test_a_column_that_is_cut_out_of_a_longer_one_keeps_its_lengths() -> None:
    column = pa.array([b"aa", b"b", None, b"cccc"]).slice(1)
    raw = raw_rows([column], oid=7, schema_id=9, read_us=5)
    assert raw.column("payload").to_pylist() == [
        b"R" + pgoutput.insert(7, [value])[1:] for value in (b"b", None, b"cccc")
    ]
