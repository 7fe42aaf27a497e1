"""Rows for people: a table where it fits, and a paragraph for each row where it does not.

Invariants: no cell and no heading is ever cut, whatever the width. A note stands on lines of its
own below its row. A pipe or a file has no width limit.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import typer
from rich.cells import cell_len

_GAP: Final = "  "
_INDENT: Final = "    "
_NOTE_WIDTH_MIN: Final = 20


@dataclass(frozen=True)
class Row:
    """The cells of a row, one for each heading, and what is said below it."""

    cells: Sequence[str]
    notes: Sequence[str] = ()


def print_rows(headings: Sequence[str], rows: Sequence[Row]) -> None:
    """Print rows for the terminal's width, or for a pipe."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    typer.echo(row_listing(headings, rows, width))


def row_listing(headings: Sequence[str], rows: Sequence[Row], width: int | None) -> str:
    """The rows as text. A heading that begins with > is of numbers."""
    names = [heading.removeprefix(">") for heading in headings]
    cells = [[_one_line(cell) for cell in row.cells] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(names, *cells, strict=True)]
    fits = width is None or sum(widths) + len(_GAP) * (len(widths) - 1) <= width
    right = [heading.startswith(">") for heading in headings]
    lines = [_aligned(names, widths, right)] if fits else []
    for row, texts in zip(rows, cells, strict=True):
        if fits:
            lines.append(_aligned(texts, widths, right))
        else:
            lines += _paragraph(names, texts, width)
        lines += [line for note in row.notes if note for line in _note(note, width)]
    return "\n".join(lines)


def _aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for cell, width, to_the_right in zip(cells, widths, right, strict=True):
        blank = " " * (width - cell_len(cell))
        padded.append(blank + cell if to_the_right else cell + blank)
    return _GAP.join(padded).rstrip()


def _paragraph(names: Sequence[str], cells: Sequence[str], width: int | None) -> list[str]:
    """A row as ``heading value`` pairs; a line ends between pairs only."""
    lines = [""]
    for name, cell in zip(names, cells, strict=True):
        if not cell:
            continue
        pair = f"{name} {cell}"
        longer = f"{lines[-1]}{_GAP}{pair}" if lines[-1] else pair
        if lines[-1] and width is not None and cell_len(longer) > width:
            lines.append(_GAP + pair)
        else:
            lines[-1] = longer
    return lines


def _note(note: str, width: int | None) -> list[str]:
    text = _one_line(note)
    if width is None:
        return [_INDENT + text]
    return textwrap.wrap(
        text,
        max(width, _NOTE_WIDTH_MIN),
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _one_line(text: str) -> str:
    """A text from anywhere, without what would move a terminal's cursor."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


def size_text(count: int | None) -> str:
    """A size for people; a consumer that holds nothing back, or a source never read, has none."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
