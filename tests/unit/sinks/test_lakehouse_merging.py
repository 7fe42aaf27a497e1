"""Merging into files, against a slow model; and texts of rows as typed columns."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding.copy_text import copied_text, read_text
from cdc.decoding.row_texts import version_text
from sinks.lakehouse.columns import Evolution, evolve
from sinks.lakehouse.merging import KeyIndex, Touched, merge_file, new_rows
from sinks.lakehouse.table import DataFile
from tests import pgoutput

_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
_KEY = st.tuples(st.integers(0, 6), st.sampled_from("xyz"))


@given(st.lists(st.one_of(st.none(), _TEXTS, st.sampled_from(["\\N", "\\", "\\t", "a\\\nb"]))))
def test_a_text_is_read_back_as_it_was_copied(texts: list[str | None]) -> None:
    column = pa.array(texts, pa.string())
    written = copied_text(column).fill_null("\\N")
    assert read_text(written).to_pylist() == texts


def _rows(found: dict[tuple[int, str], int]) -> pa.Table:
    keys = list(found)
    return pa.table(
        {
            "a": pa.array([a for a, _ in keys], pa.int64()),
            "b": pa.array([b for _, b in keys], pa.string()),
            "n": pa.array(found.values(), pa.int64()),
        }
    )


@given(
    st.dictionaries(_KEY, st.integers(0, 9)),
    st.dictionaries(_KEY, st.one_of(st.none(), st.integers(10, 19))),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_merged_files_are_what_the_changes_make_of_each_row(
    old: dict[tuple[int, str], int],
    changes: dict[tuple[int, str], int | None],
    files: int,
    rng: random.Random,
) -> None:
    places = {key: rng.randrange(files) for key in old}
    upserts = {key: value for key, value in changes.items() if value is not None}
    kept = {key: rng.random() < 0.3 for key in upserts}
    keys = [*changes]
    numbers = {key: at for at, key in enumerate(upserts)}
    touched = Touched(
        False,
        _rows(dict.fromkeys(keys, 0)).select(["a", "b"]),
        np.array([numbers.get(key, -1) for key in keys], np.int64),
        _rows(upserts),
        {"n": np.array([kept[key] for key in upserts], bool)} if any(kept.values()) else {},
    )
    index = KeyIndex(touched.keys)
    there: list[dict[str, Any]] = []
    written = []
    for file in range(files):
        rows = _rows({key: value for key, value in old.items() if places[key] == file})
        found_keys = index.find(rows.select(["a", "b"]))
        if not (found_keys >= 0).any():
            there += rows.to_pylist()
            continue
        merged = merge_file(rows, found_keys, touched)
        there += merged.rows.to_pylist()
        written.append(merged.written)
    there += new_rows(touched, written).to_pylist()
    expected = {key: value for key, value in old.items() if key not in changes}
    for key, value in upserts.items():
        expected[key] = old[key] if kept[key] and key in old else value
    found = {(row["a"], row["b"]): row["n"] for row in there}
    assert len(there) == len(found)
    assert found == expected


@pytest.mark.parametrize(
    ("bounds", "may"),
    [((0, 4), False), ((0, 5), True), ((6, 8), False), ((9, 20), True), ((10, 20), False)],
)
def test_a_file_is_opened_only_if_a_touched_key_lies_within_its_bounds(
    bounds: tuple[int, int], may: bool
) -> None:
    index = KeyIndex(pa.table({"id": pa.array([9, 5], pa.int32())}))
    assert index.may_touch(DataFile("f", 1, 1, bounds={"id": bounds})) == may
    assert index.may_touch(DataFile("f", 1, 1))  # nobody knows its bounds


def _version(*columns: tuple[str, int]) -> str:
    return version_text(pgoutput.relation(1, "public", "t", columns))


_INT, _BIGINT, _TEXT = 23, 20, 25


def _evolved(before: str, after: str, *, keeps: bool) -> Evolution:
    made = evolve(pa.schema([]), before, same_table=True, keeps=keeps)
    return evolve(made.schema, after, same_table=True, keeps=keeps)


def test_an_added_column_needs_no_file_rewritten() -> None:
    found = _evolved(_version(("id", _INT)), _version(("id", _INT), ("n", _TEXT)), keeps=False)
    assert (found.rewrites, found.schema.names) == (False, ["id", "n"])
    assert [field.name for field in found.added] == ["n"]


def test_the_same_version_changes_nothing() -> None:
    version = _version(("id", _INT), ("n", _TEXT))
    assert not _evolved(version, version, keeps=True).is_needed


def test_a_dropped_column_of_a_history_stays_under_a_free_name_when_its_name_comes_again() -> None:
    first, without = _version(("id", _INT), ("n", _INT)), _version(("id", _INT))
    again = _version(("id", _INT), ("n", _TEXT))
    dropped = _evolved(first, without, keeps=True)
    assert dropped.schema.names == ["id", "n"]
    found = evolve(dropped.schema, again, same_table=True, keeps=True)
    assert found.schema.names == ["id", "n_2", "n"]
    assert found.was == ("id", "n", None)


def test_a_widened_column_is_rewritten_in_its_place() -> None:
    before = _version(("id", _INT), ("n", _INT), ("t", _TEXT))
    after = _version(("id", _INT), ("n", _BIGINT), ("t", _TEXT))
    found = _evolved(before, after, keeps=False)
    assert found.rewrites
    assert found.schema.types == [pa.int32(), pa.int64(), pa.string()]
