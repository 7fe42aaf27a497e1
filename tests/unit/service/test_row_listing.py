"""Rows for people, in a terminal of 80 columns and in a pipe."""

from __future__ import annotations

from cdc.service.cli.row_listing import Row, row_listing

_HEADINGS = (
    "id", "table", "state", ">source", ">destination", ">missing", ">extra", ">different",
    ">changing", ">repaired",
)  # fmt: skip
_LONG = "public.a_table_with_a_rather_long_name_that_somebody_chose_one_day"
_ERROR = "the destination refused the connection, and it is not known what it holds. " * 4
_ROWS = [
    Row(("17", "public.orders", "done", "1,234,567", "1,234,566", "1", "0", "0", "0", "0")),
    Row(("18", _LONG, "failed", "", "9,876,543,210", "12", "0", "0", "0", ""), [_ERROR]),
]


def test_a_pipe_has_one_line_per_row_and_one_per_note() -> None:
    lines = row_listing(_HEADINGS, _ROWS, None).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == [heading.removeprefix(">") for heading in _HEADINGS]
    assert lines[1].split() == list(_ROWS[0].cells)
    assert lines[3] == f"    {_ERROR.strip()}"


def test_a_narrow_terminal_shows_each_heading_and_cell_whole() -> None:
    for width in (20, 40, 80):
        shown = row_listing(_HEADINGS, _ROWS, width)
        lines = shown.splitlines()
        for row in _ROWS:
            for heading, cell in zip(_HEADINGS, row.cells, strict=True):
                pair = f"{heading.removeprefix('>')} {cell}"
                assert not cell or any(pair in line for line in lines), pair
        too_wide = [line for line in lines if len(line) > width and _LONG not in line]
        assert not too_wide or width == 20


def test_a_note_keeps_its_words_and_the_width() -> None:
    lines = row_listing(("id",), [Row(("1",), [_ERROR])], 80).splitlines()
    assert all(len(line) <= 80 and line.startswith("    ") for line in lines[2:])
    assert " ".join(" ".join(lines[2:]).split()) == _ERROR.strip()


def test_numbers_stand_to_the_right() -> None:
    shown = row_listing(("id", ">rows"), [Row(("1", "5")), Row(("2", "1,000"))], 80)
    assert shown.splitlines() == ["id   rows", "1       5", "2   1,000"]


def test_a_table_that_fits_is_a_table() -> None:
    assert row_listing(("id", "name"), [Row(("1", "a\nb\x1b"), [""])], 9).splitlines() == [
        "id  name",
        "1   a b?",
    ]
