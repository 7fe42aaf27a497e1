"""The columnar decoder says exactly what a plain row-by-row decoder says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import row_decoder
from cdc.decoding import decode_changes
from tests import pgoutput
from tests.examples import examples
from tests.pgoutput import UNCHANGED, Values
from tests.unit.decoding.frames import Frame

pytestmark = pytest.mark.usefixtures("both_ways")

_TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
_INTEGER = st.integers(-(2**63), 2**63 - 1).map(str)
_TEXTS_BY_OID = {
    16: st.sampled_from(["t", "f"]),
    20: _INTEGER,
    23: st.integers(-9, 9).map(str),
    701: st.one_of(
        st.sampled_from(["NaN", "Infinity", "-Infinity", "1e+20"]), st.integers().map(str)
    ),
    1700: st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: format(d, "f")),
    25: _TEXT,
    3802: st.sampled_from(['{"a": 1}', "[1,  2]", "null", '"x\\ny"', "1e3"]),
    1184: st.just("2026-01-01 00:00:00+00"),
    77777: _TEXT,
}


@st.composite
def _relations(draw: st.DrawFn, oid: int) -> tuple[bytes, list[int]]:
    names = draw(st.lists(_TEXT.filter(bool), max_size=5, unique=True))
    types = [draw(st.sampled_from(sorted(_TEXTS_BY_OID))) for _ in names]
    keys = [draw(st.booleans()) for _ in names]
    identity = draw(st.sampled_from("dfi"))
    columns = list(zip(names, types, keys, strict=True))
    return pgoutput.relation(oid, draw(_TEXT), "t" + draw(_TEXT), columns, identity=identity), types


def _tuples(types: list[int], *, toast: bool) -> st.SearchStrategy[Values]:
    absent = st.sampled_from([None, UNCHANGED] if toast else [None])
    return st.tuples(*(st.one_of(_TEXTS_BY_OID[oid], absent) for oid in types))


@st.composite
def _payloads(draw: st.DrawFn, oid: int, types: list[int]) -> bytes:
    new, old = draw(_tuples(types, toast=True)), draw(_tuples(types, toast=False))
    if draw(st.booleans()):  # else nearly every column would differ
        old = tuple(a if isinstance(a, str) else b for a, b in zip(new, old, strict=True))
    return draw(
        st.sampled_from(
            [
                pgoutput.insert(oid, new),
                pgoutput.update(oid, new),
                pgoutput.update(oid, new, key=old),
                pgoutput.update(oid, new, old=old),
                pgoutput.delete(oid, key=old),
                pgoutput.delete(oid, old=old),
                pgoutput.truncate([oid]),
            ]
        )
    )


@st.composite
def _frames(draw: st.DrawFn) -> Frame:
    tables = [(oid, *draw(_relations(oid))) for oid in range(1, draw(st.integers(1, 3)) + 1)]
    frame = Frame()
    for _ in range(draw(st.integers(1, 12))):
        oid, relation, types = draw(st.sampled_from(tables))
        frame.add(draw(_payloads(oid, types)), relation, oid=oid)
        if draw(st.integers(0, 9)) == 0:
            frame.add(pgoutput.logical_message(draw(_TEXT), draw(st.binary(max_size=9))))
    return frame


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(_frames())
def test_columns_and_rows_decode_to_the_same_changes(frame: Frame) -> None:
    by_columns = decode_changes(frame.batch(), frame.schemas)
    by_columns.validate(full=True)
    assert (
        by_columns.to_pylist() == row_decoder.decode_frame(frame.batch(), frame.schemas).to_pylist()
    )
