"""Runs of annotations: kept as bytes, cut, joined, and put beside rows."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding.annotations import (
    AnnotationRun,
    annotations_of,
    carried_bytes,
    cut_runs,
    decode_annotations,
    encode_annotations,
    joined_runs,
)
from cdc.errors import DecodeError

ROWS = 30
RUNS = (AnnotationRun(1, 3, b"1"), AnnotationRun(3, 4, '"ü"'.encode()), AnnotationRun(6, 9, b"1"))


@st.composite
def _runs(draw: st.DrawFn) -> tuple[AnnotationRun, ...]:
    places = sorted(draw(st.sets(st.integers(0, ROWS), max_size=10)))
    pairs = zip(places[::2], places[1::2], strict=False)
    texts = st.sampled_from([b"1", b'{"user":"ann"}', '"ü"'.encode()])
    return tuple(AnnotationRun(start, stop, draw(texts)) for start, stop in pairs)


def by_row(runs: tuple[AnnotationRun, ...], rows: int) -> list[str | None]:
    found: list[str | None] = [None] * rows
    for start, stop, text in runs:
        found[start:stop] = [text.decode()] * (stop - start)
    return found


@given(runs=_runs())
def test_runs_are_read_back_as_they_were_written(runs: tuple[AnnotationRun, ...]) -> None:
    assert decode_annotations(encode_annotations(runs), ROWS) == runs


def test_a_text_of_several_runs_is_written_once() -> None:
    runs = [AnnotationRun(at, at + 1, b"x" * 1000) for at in range(100)]
    assert len(encode_annotations(runs)) < 3000


@given(runs=_runs(), start=st.integers(0, ROWS), rows=st.integers(0, ROWS))
def test_a_slice_has_the_annotations_of_its_rows(
    runs: tuple[AnnotationRun, ...], start: int, rows: int
) -> None:
    stop = min(ROWS, start + rows)
    cut = tuple(cut_runs(runs, start, stop))
    assert by_row(cut, stop - start) == by_row(runs, ROWS)[start:stop]
    column = annotations_of(cut, stop - start)
    assert (column is None) == (not cut)
    if column is not None:
        column.validate(full=True)
        assert column.to_pylist() == by_row(cut, stop - start)


@given(runs=_runs(), cuts=st.lists(st.integers(0, ROWS), max_size=5))
def test_slices_joined_again_are_the_whole(
    runs: tuple[AnnotationRun, ...], cuts: list[int]
) -> None:
    bounds = [0, *sorted(cuts), ROWS]
    pieces = [
        (tuple(cut_runs(runs, start, stop)), stop - start)
        for start, stop in itertools.pairwise(bounds)
    ]
    assert by_row(joined_runs(pieces), ROWS) == by_row(runs, ROWS)
    assert carried_bytes(joined_runs(pieces)) == carried_bytes(runs)
    assert len(joined_runs(pieces)) <= len(runs)


def test_anything_but_whole_runs_is_refused() -> None:
    data = encode_annotations(RUNS)
    for length in range(len(data)):
        with pytest.raises(DecodeError, match="annotations of a frame"):
            decode_annotations(data[:length], ROWS)
    with pytest.raises(DecodeError, match="are not 3 runs"):
        decode_annotations(data + b"\0", ROWS)


@given(data=st.data())
def test_changed_bytes_are_refused_or_say_something_else(data: st.DataObject) -> None:
    encoded = bytearray(encode_annotations(RUNS))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_annotations(bytes(encoded), ROWS)
    except DecodeError:
        return
    assert encode_annotations(found) == encoded


@pytest.mark.parametrize(
    "runs",
    [
        [AnnotationRun(2, 2, b"1")],
        [AnnotationRun(3, 2, b"1")],
        [AnnotationRun(0, ROWS + 1, b"1")],
        [AnnotationRun(0, 3, b"1"), AnnotationRun(2, 4, b"2")],
        [AnnotationRun(4, 6, b"1"), AnnotationRun(0, 2, b"2")],
        [AnnotationRun(0, 1, b'"\xff"')],
    ],
)
def test_runs_that_cannot_be_are_refused(runs: list[AnnotationRun]) -> None:
    with pytest.raises(DecodeError):
        decode_annotations(encode_annotations(runs), ROWS)


def test_a_text_without_rows_or_written_twice_is_refused() -> None:
    def encoded(texts: list[bytes], runs: list[tuple[int, int, int]]) -> bytes:
        parts = [b"WBA1", struct.pack(">I", len(texts))]
        parts += [struct.pack(">I", len(text)) + text for text in texts]
        parts += [struct.pack(">I", len(runs)), *(struct.pack(">III", *run) for run in runs)]
        return b"".join(parts)

    assert decode_annotations(encoded([b"1"], [(0, 1, 0)]), ROWS) == (AnnotationRun(0, 1, b"1"),)
    for texts, runs in (
        ([b"1", b"2"], [(0, 1, 0)]),
        ([b"1", b"2"], [(0, 1, 1), (1, 2, 0)]),
        ([b"1", b"1"], [(0, 1, 0), (1, 2, 1)]),
    ):
        with pytest.raises(DecodeError, match="not those of the runs"):
            decode_annotations(encoded(texts, runs), ROWS)
