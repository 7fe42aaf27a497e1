"""Typed columns as both sides of a comparison write them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.decoding.plan import TablePlan, plan_for
from cdc.errors import OperatorError
from cdc.verify.typed_rows import NO_PLACE, contents, key_texts, typed_contents, typed_keys
from tests.pgoutput import relation

MAP = pa.map_(pa.string(), pa.int32())


def _plan(*columns: tuple[str, int] | tuple[str, int, bool]) -> TablePlan:
    return plan_for(relation(1, "public", "t", list(columns)))


def test_values_within_values_have_texts_of_their_own() -> None:
    columns = [
        pa.array([[("a", 1), ("b", None)], None], MAP),
        pa.array([{"x": [1.5, None]}, {"x": []}], pa.struct([("x", pa.list_(pa.float64()))])),
        pa.array([b"\x00\xff", None], pa.binary()),
    ]
    assert contents(["m", "s", "r"], columns).to_pylist() == [
        r'{"m":"[[\"a\",\"1\"],[\"b\",null]]","s":"[[\"1.5\",null]]","r":"00ff"}',
        r'{"m":null,"s":"[[]]","r":null}',
    ]


def test_a_text_at_the_destination_counts_as_the_value_it_stands_for() -> None:
    plan = _plan(("id", 23, True), ("n", 20))
    typed = pa.table({"id": pa.array([1, 2], pa.int32()), "n": pa.array([7, None], pa.int64())})
    texts = pa.table({"id": pa.array([1, 2], pa.int32()), "n": pa.array(["7", None])})
    assert typed_contents(plan, texts) == typed_contents(plan, typed)


def test_a_value_that_its_type_cannot_have_equals_nothing() -> None:
    plan = _plan(("id", 23, True), ("n", 20))
    rows = pa.table({"id": pa.array([1, 2], pa.int32()), "n": pa.array(["word", "8"])})
    assert typed_contents(plan, rows).to_pylist() == [NO_PLACE, '{"id":"2","n":"8"}']


def test_a_key_that_is_no_value_of_its_type_is_looked_for_nowhere() -> None:
    plan = _plan(("id", 23, True), ("n", 20))
    assert typed_keys(plan, [("1",), ("word",), ("3",)], ["id"]).to_pydict() == {"id": [1, 3]}


def test_a_key_whose_text_cannot_be_restored_is_refused() -> None:
    plan = _plan(("f", 701, True), ("n", 20))
    rows = pa.table({"f": [1e15], "n": [1]})
    with pytest.raises(OperatorError, match=r"column f of the key of public\.t"):
        key_texts(plan, rows, ["f"])
