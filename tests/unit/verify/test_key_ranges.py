"""Both sides of a comparison, in ranges of key hashes."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.verify.held import HELD_SCHEMA, key_text, rows_held
from cdc.verify.key_ranges import RANGES_MAX, HeldSide, compare, ranges_for

Row = tuple[str | None, bytes | None, int, int]


def _held(rows: dict[int, bytes]) -> pa.RecordBatch:
    keys = pa.array([key_text([str(key)]) for key in rows], pa.string())
    return rows_held(keys, pa.array([*rows.values()], pa.binary()))


def _messages(*rows: Row) -> pa.RecordBatch:
    columns = [*zip(*rows, strict=True), [None] * len(rows)]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, HELD_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=HELD_SCHEMA)


def _side(directory: Path, ranges: int, *batches: pa.RecordBatch) -> HeldSide:
    side = HeldSide(directory, ranges)
    for batch in batches:
        side.add(batch)
    side.close()
    return side


@pytest.mark.parametrize("ranges", [1, 2, 64])
def test_the_keys_of_missing_extra_and_different_rows_are_found(
    tmp_path: Path, ranges: int
) -> None:
    rows = {key: b"row %d" % key for key in range(3_000)}
    theirs = {**rows, 17: b"other", 9_999: b"extra"}
    del theirs[5]
    shuffled = [*theirs.items()]
    random.Random(1).shuffle(shuffled)
    parts = [_held(dict(shuffled[at : at + 700])) for at in range(0, len(shuffled), 700)]
    source = _side(tmp_path / "source", ranges, _held(rows))
    destination = _side(tmp_path / "destination", ranges, *parts)
    found = [compare(source.range(n), destination.range(n)) for n in range(ranges)]
    assert sorted(key for each in found for key in each.keys) == ['["17"]', '["5"]', '["9999"]']
    assert sum(each.source_rows for each in found) == 3_000
    assert sum(each.destination_rows for each in found) == 3_000


def test_of_messages_the_last_one_of_each_key_counts_whatever_order_they_come_in(
    tmp_path: Path,
) -> None:
    side = _side(
        tmp_path / "side",
        2,
        _messages(('["1"]', b"new", 20, 3), ('["2"]', None, 20, 4), ('["3"]', b"only", 20, 5)),
        _messages(('["1"]', b"old", 20, 1), ('["2"]', b"was here", 10, 0)),
    )
    source = _side(tmp_path / "source", 2, _held({1: b"new", 3: b"only"}))
    assert [compare(source.range(n), side.range(n)).keys for n in range(2)] == [[], []]
    keys = [key for n in range(2) for key in side.range(n).keys.to_pylist()]
    assert sorted(keys) == ['["1"]', '["3"]']


def test_a_truncate_ends_what_came_before_it(tmp_path: Path) -> None:
    side = _side(
        tmp_path / "side",
        1,
        _messages(('["1"]', b"a", 10, 0), (None, None, 20, 0), ('["2"]', b"b", 20, 1)),
        _messages(('["3"]', b"c", 19, 7)),
    )
    assert side.range(0).keys.to_pylist() == ['["2"]']


def test_a_side_without_rows_has_empty_ranges(tmp_path: Path) -> None:
    empty = _side(tmp_path / "empty", 4)
    full = _side(tmp_path / "full", 4, _held({1: b"x", 2: b"y"}))
    lost = [key for n in range(4) for key in compare(full.range(n), empty.range(n)).keys]
    more = [key for n in range(4) for key in compare(empty.range(n), full.range(n)).keys]
    assert sorted(lost) == sorted(more) == ['["1"]', '["2"]']


def test_the_number_of_ranges_grows_with_the_table_up_to_a_bound() -> None:
    assert [ranges_for(rows) for rows in (0, 250_000, 250_001, 1_000_000)] == [1, 1, 2, 4]
    assert ranges_for(10**12) == RANGES_MAX
