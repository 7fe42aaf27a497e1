"""Text for COPY, and LSNs, by whole columns."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.cursor import parse_lsn
from cdc.decoding.copy_text import copied_text, lsn_texts

_BACK = {"\\": "\\", "n": "\n", "t": "\t", "r": "\r"}


def read_back(line: str) -> str:
    """As Postgres reads a value of COPY."""
    found, rest = "", iter(line)
    for character in rest:
        found += _BACK[next(rest)] if character == "\\" else character
    return found


@given(st.lists(st.text(alphabet='ab\\\n\t\r"é👋N', max_size=12)), st.integers(0, 3))
def test_every_text_is_read_back_and_none_breaks_its_line(texts: list[str], start: int) -> None:
    column = pa.array(texts, pa.string()).slice(start)
    written = copied_text(column).to_pylist()
    assert [read_back(line) for line in written] == texts[start:]
    assert not any(set(line) & set("\n\t\r") for line in written)


@given(st.lists(st.integers(0, 2**63 - 1)), st.integers(0, 3))
def test_an_lsn_is_written_as_postgres_reads_it(lsns: list[int], start: int) -> None:
    written = lsn_texts(pa.array(lsns, pa.int64()).slice(start)).to_pylist()
    assert [parse_lsn(text) for text in written] == lsns[start:]
