"""The file of a chunk: its decoded columns are those that decoding its messages gives."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.backfill.chunk_file import ChunkFile, chunk_file, rows_of
from cdc.backfill.copy_rows import columns_of
from cdc.backfill.table import PublishedTable
from cdc.config.table import TableName
from cdc.decoding.format import ROW_TEXT, ValueFormat, Wanted
from cdc.decoding.isolate import decode_carefully
from tests import pgoutput
from tests.examples import examples
from tests.unit.backfill.test_copy_rows import line

_OID = 7
_READ_US = 5
_COLUMNS: list[tuple[str, int] | tuple[str, int, bool]] = [
    ("id", 23, True),
    ("note", 25),
    ("paid", 16),
    ("amount", 1700),
]
_MESSAGE = pgoutput.relation(_OID, "public", "docs", _COLUMNS)
_TABLE = PublishedTable(TableName("public", "docs"), _MESSAGE, None, (), may_omit=True)
_WANTED = [
    Wanted(),
    Wanted((ValueFormat(), ValueFormat(numbers="string")), before=True, keyed=True),
    Wanted(times=("note", "nowhere"), described=True),
    Wanted(texts=True),
    Wanted((), texts=True),
]
_NOTES = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
_ROWS = st.lists(
    st.tuples(st.integers(0, 99).map(str), _NOTES, st.sampled_from(["t", "f", None]),
              st.sampled_from(["0.10", "NaN", "123456789012345678901", None])),
    min_size=1, max_size=12,
)  # fmt: skip


def written(path: Path, wanted: Wanted | None, *texts: bytes) -> ChunkFile:
    """A file of one batch for each text of COPY."""
    with chunk_file(path, _TABLE, wanted, _READ_US) as write:
        for text in texts:
            write(rows_of(text, _TABLE, _READ_US, wanted))
    return ChunkFile(path)


@pytest.mark.parametrize("wanted", _WANTED)
@settings(max_examples=examples(10), deadline=None)
@given(rows=_ROWS)
def test_decoded_columns_are_those_of_the_messages(
    wanted: Wanted, rows: list[tuple[str | None, ...]]
) -> None:
    text = b"".join(line([*row]) for row in rows)
    with tempfile.TemporaryDirectory() as directory:
        stored = written(Path(directory) / "chunk.arrow", wanted, text).stored(0, len(rows))
    parts = stored.decoded(wanted)
    assert parts is not None
    found = pa.concat_batches(parts)
    found.validate(full=True)
    expected = decode_carefully(
        stored.raw, {xxhash.xxh3_64_intdigest(_MESSAGE): _MESSAGE}, wanted=wanted
    )
    for name in expected.schema.names:
        if name != ROW_TEXT:  # COPY may write a character in another way
            assert found.column(name).to_pylist() == expected.column(name).to_pylist(), name
    if wanted.texts:
        assert _values(found) == _values(expected)


@given(rows=_ROWS, cut=st.integers(0, 12))
def test_messages_that_are_made_late_are_those_made_at_once(
    rows: list[tuple[str | None, ...]], cut: int
) -> None:
    texts = [b"".join(line([*row]) for row in part) for part in (rows[:cut], rows[cut:]) if part]
    with tempfile.TemporaryDirectory() as directory:
        late = written(Path(directory) / "late.arrow", Wanted(), *texts)
        at_once = written(Path(directory) / "at_once.arrow", None, *texts)
    for start in range(len(rows)):
        for count in (1, len(rows) - start):
            assert late.rows(start, count).equals(at_once.rows(start, count))


def _values(rows: pa.RecordBatch) -> list[list[bytes | None]]:
    lines = "".join(f"{text}\n" for text in rows.column(ROW_TEXT).to_pylist())
    return [column.to_pylist() for column in columns_of(lines.encode(), len(_COLUMNS))]


def test_rows_with_a_bad_value_are_decoded_when_their_cursors_are_known(tmp_path: Path) -> None:
    text = line(["1", "sound", "t", "1"]) + line(["2", "bad", "perhaps", "1"])
    file = written(tmp_path / "chunk.arrow", Wanted(), text)
    assert file.stored(0, 2).decoded(Wanted()) is None
    assert file.stored(0, 1).decoded(Wanted()) is not None


def test_rows_that_were_decoded_for_something_else_are_decoded_again(tmp_path: Path) -> None:
    file = written(tmp_path / "chunk.arrow", Wanted(), line(["1", "x", "t", "1"]))
    assert file.stored(0, 1).decoded(Wanted(texts=True)) is None
    bare = written(tmp_path / "bare.arrow", None, line(["1", "x", "t", "1"]))
    assert bare.stored(0, 1).keys is None


def test_a_piece_has_as_many_rows_as_its_bytes_allow(tmp_path: Path) -> None:
    texts = [b"".join(line([str(i), "x", "t", "1"]) for i in range(n)) for n in (3, 2, 4)]
    file = written(tmp_path / "chunk.arrow", Wanted(), *texts)
    assert [file.within(at, 0) for at in range(9)] == [3, 2, 1, 2, 1, 4, 3, 2, 1]
    assert [file.within(at, 1 << 20) for at in range(9)] == [*range(9, 0, -1)]
    first, second = (file.stored(at, count).nbytes for at, count in ((0, 3), (3, 2)))
    assert file.within(0, first + second) == 5
    assert file.within(1, first + second - 1) == 2
    assert file.stored(2, 5).raw.num_rows == 5  # across what was read together
