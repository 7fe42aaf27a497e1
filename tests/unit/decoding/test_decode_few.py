"""A few rows decoded one by one are those that whole columns give, to the byte, or left to them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cdc.decoding import decode_changes, small_batch
from cdc.decoding.format import PLAIN, ValueFormat, Wanted
from tests import pgoutput
from tests.examples import examples
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.frames import OID, Frame

_ODD = st.text('0123456789-+.:eTZ tfn"\\\n/\x7f\x1bäNaIinity', max_size=26)
_TIME = st.datetimes().map(lambda t: t.isoformat(" "))
_USUAL: dict[int, st.SearchStrategy[str]] = {
    16: st.sampled_from("tf"),
    20: st.integers(-(2**63), 2**63 - 1).map(str),
    21: st.integers(-9, 9).map(str),
    23: st.integers(-(2**31), 2**31 - 1).map(str),
    25: st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12),
    26: st.integers(0, 2**32 - 1).map(str),
    700: st.sampled_from(["0", "-1.5", "1e+20", "1e-05"]),
    701: st.floats(allow_nan=False, allow_infinity=False, min_value=-1, max_value=1).map(
        lambda x: format(x, ".3f")
    ),
    1082: st.dates().map(str),
    1114: _TIME,
    1184: _TIME.map(lambda text: text + "+00"),
    1700: st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: format(d, "f")),
    2950: st.uuids().map(str),
    3802: st.sampled_from(['{"a": 1}', "[1,  2]", "null", '"x\\ny"', "1e3"]),
}
_KEYED = Wanted(keyed=True)
_WITH_TIMES = Wanted(before=True, times=("c0", "c1"))


@st.composite
def _frames(draw: st.DrawFn, odd: bool) -> Frame:
    types = draw(st.lists(st.sampled_from(sorted(_USUAL)), min_size=1, max_size=6))
    columns = [(f"c{at}", oid, draw(st.booleans())) for at, oid in enumerate(types)]
    relation = pgoutput.relation(OID, "public", draw(st.sampled_from(["t", 'o"r'])), columns)
    frame = Frame()
    for _ in range(draw(st.integers(1, 6))):
        values = tuple(
            draw(st.one_of(st.none(), _USUAL[oid], *([_ODD] if odd else []))) for oid in types
        )
        write = draw(
            st.sampled_from(
                [
                    lambda row: pgoutput.insert(OID, row),
                    lambda row: pgoutput.update(OID, row),
                    lambda row: pgoutput.delete(OID, key=row),
                    lambda row: pgoutput.delete(OID, old=row),
                ]
            )
        )
        frame.add(write(values), relation)
    return frame


def _by_columns(frame: Frame, wanted: Wanted = PLAIN) -> pa.RecordBatch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_batch, "ROWS_MAX", 0)
        return decode_changes(frame.batch(), frame.schemas, wanted=wanted)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(_frames(odd=False), st.sampled_from([PLAIN, _KEYED, _WITH_TIMES, Wanted(texts=True)]))
def test_usual_rows_are_decoded_and_the_same(frame: Frame, wanted: Wanted) -> None:
    found = small_batch.decode_few(frame.batch(), frame.schemas, None, wanted)
    assert found is not None
    found.validate(full=True)
    expected = _by_columns(frame, wanted)
    assert found.schema == expected.schema
    assert found.to_pylist() == expected.to_pylist()


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(_frames(odd=True))
def test_odd_values_are_the_same_or_left_to_whole_columns(frame: Frame) -> None:
    found = small_batch.decode_few(frame.batch(), frame.schemas, None, PLAIN)
    if found is not None:
        assert found.to_pylist() == _by_columns(frame).to_pylist()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(_frames(odd=False), st.data())
def test_broken_messages_are_left_to_whole_columns(frame: Frame, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(frame.rows) - 1))
    relation, schema, payload = frame.rows[at]
    cut = data.draw(st.integers(1, len(payload) - 1))
    broken = data.draw(st.sampled_from([payload[:cut], payload + b"x"]))
    frame.rows[at] = (relation, schema, broken)
    assert small_batch.decode_few(frame.batch(), frame.schemas, None, PLAIN) is None


def test_rare_values_are_left_to_whole_columns() -> None:
    relation = pgoutput.relation(OID, "public", "t", [("id", 23, True), ("note", 25, False)])
    point = pgoutput.relation(OID, "public", "t", [("id", 23, True), ("tags", 1009, False)])
    usual = pgoutput.insert(OID, ["1", "a"])
    rare = {
        "an old row": Frame().add(pgoutput.update(OID, ["1", "b"], old=["1", "a"]), relation),
        "an old key": Frame().add(pgoutput.update(OID, ["2", "b"], key=["1", None]), relation),
        "a value that was not sent": Frame().add(pgoutput.update(OID, ["1", UNCHANGED]), relation),
        "a truncate": Frame().add(pgoutput.truncate([OID]), relation),
        "a message": Frame().add(pgoutput.logical_message("p", b"x")),
        "a type": Frame().add(pgoutput.insert(OID, ["1", "{a}"]), point),
        "another table": Frame().add(usual, relation, oid=OID + 1),
        "much": Frame().add(pgoutput.insert(OID, ["1", "a" * 100_000]), relation),
    }
    for what, frame in rare.items():
        assert small_batch.decode_few(frame.batch(), frame.schemas, None, PLAIN) is None, what
    frame = Frame().add(usual, relation)
    other = Wanted((ValueFormat(numbers="string"),))
    assert small_batch.decode_few(frame.batch(), frame.schemas, None, other) is None
    assert small_batch.decode_few(frame.batch(), frame.schemas, None, PLAIN) is not None
