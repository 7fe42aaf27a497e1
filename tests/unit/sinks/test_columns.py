"""Cutting batches and skipping what is already there."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest

from cdc.cursor import ORIGIN, Cursor
from cdc.cursor_columns import prefix_at_or_below
from cdc.decoding.shapes import SHAPES, ShapeName
from sinks.columns import bytes_bound, message_bytes, pieces
from sinks.position import cursor_name
from tests.conformance.messages import Sample, batch, batch_of, cursor_of, numbered


@pytest.mark.parametrize(("messages_max", "bytes_max"), [(1, 10**9), (7, 10**9), (50, 2_000)])
def test_pieces_keep_order_shape_and_both_bounds(messages_max: int, bytes_max: int) -> None:
    whole = batch(0, 100)
    parts = whole.shape.message_parts
    cut = list(pieces(whole, parts, messages_max=messages_max, bytes_max=bytes_max))
    assert [row for piece, _ in cut for row in piece.rows.to_pylist()] == whole.rows.to_pylist()
    assert all(len(piece) <= messages_max and size <= bytes_max for piece, size in cut)
    assert all(piece.shape is whole.shape for piece, _ in cut)
    assert sum(size for _, size in cut) == message_bytes(whole.rows, parts).sum()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_size_of_a_message_is_known_from_what_is_sent(shape: ShapeName) -> None:
    whole = batch(0, 300, shape)
    sent = pc.sum(pc.binary_length(whole.messages())).as_py()
    told = message_bytes(whole.rows, whole.shape.message_parts).sum()
    assert sent == pytest.approx(told, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_size_of_an_entry_is_known_from_its_fields(shape: ShapeName) -> None:
    whole = batch(0, 300, shape)
    fields = whole.fields().values()
    sent = sum(pc.sum(pc.binary_length(pc.fill_null(each, "null"))).as_py() for each in fields)
    told = message_bytes(whole.rows, whole.shape.entry_parts).sum()
    assert sent == pytest.approx(told, rel=0.25)


def test_a_message_beyond_the_bound_is_a_piece_of_its_own() -> None:
    samples = numbered(0, 5)
    samples[2] = Sample({"blob": "x" * 5_000})
    whole = batch_of(samples)
    parts = whole.shape.message_parts
    cut = list(pieces(whole, parts, messages_max=100, bytes_max=4_000))
    assert [len(piece) for piece, _ in cut] == [2, 1, 2]
    assert cut[1][1] > 5_000


@pytest.mark.parametrize("skipped", [0, 1, 6, 7, 8, 39])
def test_the_prefix_ends_at_the_cursor_also_inside_a_transaction(skipped: int) -> None:
    rows = batch(0, 40).rows
    cursor = cursor_of(skipped - 1) if skipped else ORIGIN
    assert prefix_at_or_below(rows, cursor) == skipped


def test_cursor_names_sort_as_cursors_do() -> None:
    cursors = [
        Cursor(lsn, idx) for lsn in (1, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1) for idx in (2, 10)
    ]
    assert sorted(map(cursor_name, cursors)) == list(map(cursor_name, cursors))


def test_nothing_is_cut_into_nothing() -> None:
    empty = batch(0, 3).slice(3)
    assert list(pieces(empty, empty.shape.message_parts, messages_max=9, bytes_max=9)) == []


def test_a_batch_that_surely_fits_comes_whole_and_no_smaller_than_it_is() -> None:
    some = batch(0, 9)
    parts = some.shape.message_parts
    ((whole, size),) = pieces(some, parts, messages_max=9, bytes_max=1 << 20)
    assert whole is some
    assert size == bytes_bound(some.rows, parts) >= int(message_bytes(some.rows, parts).sum())
