"""Cutting batches and skipping what is already there."""

from __future__ import annotations

import pytest

from cdc.cursor import ORIGIN, Cursor
from sinks.columns import message_bytes, pieces, prefix_at_or_below
from sinks.position import cursor_name
from tests.conformance.messages import Sample, batch, batch_of, cursor_of, numbered


@pytest.mark.parametrize(("messages_max", "bytes_max"), [(1, 10**9), (7, 10**9), (50, 2_000)])
def test_pieces_keep_order_and_both_bounds(messages_max: int, bytes_max: int) -> None:
    rows = batch(0, 100).rows
    cut = list(pieces(rows, messages_max=messages_max, bytes_max=bytes_max))
    assert [row for piece, _ in cut for row in piece.to_pylist()] == rows.to_pylist()
    assert all(piece.num_rows <= messages_max and size <= bytes_max for piece, size in cut)
    assert sum(size for _, size in cut) == message_bytes(rows).sum()


def test_a_message_beyond_the_bound_is_a_piece_of_its_own() -> None:
    samples = numbered(0, 5)
    samples[2] = Sample({"blob": "x" * 5_000})
    cut = list(pieces(batch_of(samples).rows, messages_max=100, bytes_max=4_000))
    assert [piece.num_rows for piece, _ in cut] == [2, 1, 2]
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
