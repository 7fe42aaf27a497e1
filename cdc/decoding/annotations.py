"""What transactions said of themselves, by runs of a frame's rows: kept, read, put beside rows.

A run says which rows carry a text; the text is JSON, on one line. Which rows those are is worked
out where batches are sealed, because a slice of a batch cannot know. In a frame the runs stand in
the metadata of its Arrow schema under ``ANNOTATIONS_KEY``, and the key is left out where there are
none. Invariants: runs rise and never overlap; ``decode_annotations`` gives back exactly
what ``encode_annotations`` took, and refuses every other sequence of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from cdc.errors import DecodeError

ANNOTATIONS_KEY: Final = b"walbrook.annotations"
"""Where the encoded runs stand in the metadata of a frame's Arrow schema."""

_MAGIC: Final = b"WBA1"
_COUNT: Final = struct.Struct(">I")
_RUN: Final = struct.Struct(">III")  # start, stop, which text


class AnnotationRun(NamedTuple):
    """The rows ``[start, stop)`` carry ``text``."""

    start: int
    stop: int
    text: bytes


def cut_runs(
    runs: Iterable[AnnotationRun], start: int, stop: int, *, at: int = 0
) -> Iterator[AnnotationRun]:
    """The runs over the rows ``[start, stop)``, numbered as if the first of these were ``at``."""
    for run in runs:
        first, last = max(run.start, start), min(run.stop, stop)
        if first < last:
            yield AnnotationRun(first - start + at, last - start + at, run.text)


def joined_runs(pieces: Iterable[tuple[Iterable[AnnotationRun], int]]) -> tuple[AnnotationRun, ...]:
    """The runs of pieces that follow each other, each with the number of its rows."""
    joined: list[AnnotationRun] = []
    offset = 0
    for runs, rows in pieces:
        for run in cut_runs(runs, 0, rows, at=offset):
            if joined and joined[-1].stop == run.start and joined[-1].text == run.text:
                run = joined.pop()._replace(stop=run.stop)
            joined.append(run)
        offset += rows
    return tuple(joined)


def carried_bytes(runs: Iterable[AnnotationRun]) -> int:
    """How many bytes the texts take once each row has its own."""
    return sum((run.stop - run.start) * len(run.text) for run in runs)


def annotations_of(runs: Sequence[AnnotationRun], rows: int) -> pa.StringArray | None:
    """One text a row, null where there is none; None if no row has any."""
    if not runs:
        return None
    texts = {text: code for code, text in enumerate(dict.fromkeys(run.text for run in runs))}
    code_of_row = np.full(rows, len(texts), dtype=np.int32)  # the last entry is null
    for run in runs:
        code_of_row[run.start : run.stop] = texts[run.text]
    known = pa.array([*texts, None], pa.binary()).cast(pa.string())
    return known.take(pa.array(code_of_row))


def encode_annotations(runs: Sequence[AnnotationRun]) -> bytes:
    """The runs as bytes; a text that several of them have is written once."""
    texts = {text: code for code, text in enumerate(dict.fromkeys(run.text for run in runs))}
    parts = [_MAGIC, _COUNT.pack(len(texts))]
    for text in texts:
        parts += (_COUNT.pack(len(text)), text)
    parts.append(_COUNT.pack(len(runs)))
    parts += (_RUN.pack(run.start, run.stop, texts[run.text]) for run in runs)
    return b"".join(parts)


def decode_annotations(data: bytes, rows: int) -> tuple[AnnotationRun, ...]:
    """Read what ``encode_annotations`` wrote for a frame of ``rows`` rows."""
    if not data.startswith(_MAGIC):
        raise _broken("they do not start as such")
    count, at = _count(data, len(_MAGIC))
    texts: list[bytes] = []
    for _ in range(count):
        length, at = _count(data, at)
        texts.append(data[at : at + length])
        at += length
        if at > len(data) or not _is_text(texts[-1]):
            raise _broken(f"text {len(texts)} of {count} is cut off or not UTF-8")
    count, at = _count(data, at)
    if len(data) - at != count * _RUN.size:
        raise _broken(f"{len(data) - at} bytes are not {count} runs")
    found: list[AnnotationRun] = []
    end = 0
    for start, stop, code in _RUN.iter_unpack(data[at:]):
        if not end <= start < stop <= rows or code >= len(texts):
            raise _broken(f"run {len(found) + 1} of {count} fits neither its place nor the texts")
        found.append(AnnotationRun(start, stop, texts[code]))
        end = stop
    if list(dict.fromkeys(run.text for run in found)) != texts:
        raise _broken("the texts are not those of the runs")
    return tuple(found)


def _count(data: bytes, at: int) -> tuple[int, int]:
    """The count at ``at``, and where what it counts begins."""
    if at + _COUNT.size > len(data):
        raise _broken(f"they end at byte {len(data)}, in the middle")
    return _COUNT.unpack_from(data, at)[0], at + _COUNT.size


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _broken(why: str) -> DecodeError:
    return DecodeError(
        f"The annotations of a frame cannot be read: {why}",
        fix="the frame was written by another version or is damaged; read it from the slot again",
    )
