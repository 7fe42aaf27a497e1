"""The difference of two column lists: applied to the old one, it gives the new one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding.column_diff import ColumnDiff, ColumnShape, diff_columns

INT, TEXT = 23, 25
Columns = list[ColumnShape]


def columns(*specs: str) -> Columns:
    """``a:23`` is the column a of type 23; ``1=a:23`` has the attribute number 1."""
    made = []
    for spec in specs:
        number, _, rest = spec.rpartition("=")
        name, _, oid = rest.partition(":")
        made.append(ColumnShape(int(number) if number else None, name, int(oid or INT), -1))
    return made


def applied(diff: ColumnDiff, old: Columns) -> list[tuple[str, int, int]]:
    dropped = {column.name for column in diff.dropped}
    renamed = dict(diff.renamed)
    retyped = {now.name: now for _, now in diff.retyped}
    result = []
    for column in old:
        if column.name not in dropped:
            name = renamed.get(column.name, column.name)
            result.append((name, *retyped.get(name, column).type))
    for at, column in diff.added:
        result.insert(at, (column.name, *column.type))
    return result


shapes = st.tuples(
    st.sampled_from("abcdef"), st.sampled_from([INT, TEXT]), st.sampled_from([-1, 8])
)
plain = st.lists(shapes, max_size=6, unique_by=lambda column: column[0]).map(
    lambda found: [ColumnShape(None, *column) for column in found]
)
numbered = st.tuples(
    st.lists(shapes, max_size=6, unique_by=lambda column: column[0]),
    st.sets(st.integers(1, 9), min_size=6, max_size=6),
).map(lambda found: [ColumnShape(n, *c) for c, n in zip(found[0], sorted(found[1]), strict=False)])


@given(
    st.one_of(st.tuples(plain, plain), st.tuples(numbered, numbered), st.tuples(numbered, plain))
)
def test_applied_to_the_old_columns_it_gives_the_new_ones(pair: tuple[Columns, Columns]) -> None:
    old, new = pair
    assert applied(diff_columns(old, new), old) == [(c.name, *c.type) for c in new]


@given(plain)
def test_nothing_differs_from_itself(old: Columns) -> None:
    assert diff_columns(old, old) == ColumnDiff((), (), (), ())


@pytest.mark.parametrize(
    ("old", "new", "added", "dropped", "renamed", "retyped"),
    [
        ("a b", "a b c", "c", "", "", ""),
        ("a b c", "a c", "", "b", "", ""),
        ("a b c", "a x c", "", "", "b>x", ""),
        ("a b", "x y", "", "", "a>x b>y", ""),
        ("a b:25", "a x", "x", "b", "", ""),
        ("a b", "a b:25", "", "", "", "b"),
        ("a b c", "b c a", "a", "a", "", ""),
        ("a b c", "b x", "x", "a c", "", ""),
        ("1=a 2=b", "2=b 3=c", "c", "a", "", ""),
        ("1=a 2=b 3=c", "2=b 3=d", "", "a", "c>d", ""),
        ("1=a 2=b", "1=b 2=a", "", "", "a>b b>a", ""),
        ("1=a 2=b", "1=a 3=b", "b", "b", "", ""),
        ("1=a", "1=b:25", "", "", "a>b", "b"),
        ("1=a 2=b", "1=a 3=c", "c", "b", "", ""),
        ("1=a b", "1=a c", "", "", "b>c", ""),
    ],
)
def test_changes_of_columns_are_distinguished(
    old: str, new: str, added: str, dropped: str, renamed: str, retyped: str
) -> None:
    diff = diff_columns(columns(*old.split()), columns(*new.split()))
    assert " ".join(column.name for _, column in diff.added) == added
    assert " ".join(column.name for column in diff.dropped) == dropped
    assert " ".join(">".join(pair) for pair in diff.renamed) == renamed
    assert " ".join(now.name for _, now in diff.retyped) == retyped
