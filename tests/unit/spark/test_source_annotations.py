"""The source: a slice of a batch, alone or joined with others, keeps its rows' annotations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.cursor import Cursor
from spark_pipeline.slices.raw_rows import BYTES_PER_DECODE_MAX
from spark_pipeline.source.options import Options
from spark_pipeline.source.range_reader import LogPartition, RangeReader
from spark_pipeline.source.slicing import cut
from tests.unit.replication.annotated import set_annotation
from tests.wire_messages import ITEM, row, transaction
from tests.written_log import write


def read(log: Path, partitions: int) -> Iterator[pa.RecordBatch]:
    """What ``partitions`` tasks decode of a whole log."""
    reader = RangeReader(Options.read({"path": str(log)}))
    view = reader.log(None)
    end = view.next_batch()
    rows = [int(count) for count in view.entries(0, end)["rows"]]
    for slices in cut(0, rows, partitions):
        yield from reader.read(LogPartition(0, end, view.history(), slices))


@pytest.mark.parametrize("partitions", range(1, 12))
def test_slices_of_batches_give_each_change_what_it_carries(
    tmp_path: Path, partitions: int
) -> None:
    messages = [
        *transaction(100, row(), set_annotation(b'"a"'), row(), row()),
        *transaction(200, row(), row()),
        *transaction(300, set_annotation(b'"b"'), row(), row()),
    ]
    write(tmp_path, [ITEM, *messages[:4]], messages[4:9], messages[9:12], messages[12:])
    found = {}
    for changes in read(tmp_path, partitions):
        changes.validate(full=True)
        for change in changes.to_pylist():
            cursor = Cursor(change["commit_lsn"], change["commit_idx"])
            found[cursor] = change["annotations"]
    assert len(found) == 9
    assert {cursor: text for cursor, text in found.items() if text} == {
        Cursor(100, 2): '"a"', Cursor(100, 3): '"a"', Cursor(300, 2): '"b"', Cursor(300, 3): '"b"',
    }  # fmt: skip


def test_changes_without_annotations_have_none(tmp_path: Path) -> None:
    write(tmp_path, [ITEM, *transaction(100, row())], transaction(200, row()))
    (changes,) = read(tmp_path, 1)
    assert changes.column("annotations").null_count == 2


def test_long_annotations_are_not_joined_beyond_what_one_decode_may_hold(tmp_path: Path) -> None:
    text = b'"' + b"x" * 8000 + b'"'
    batches = [transaction(100 * n, set_annotation(text), *[row()] * 2400) for n in range(1, 5)]
    write(tmp_path, [ITEM, *transaction(50, row())], *batches)
    decoded = list(read(tmp_path, 1))
    assert [changes.num_rows for changes in decoded] == [2402, 2401, 2401, 2401]
    assert all(changes.nbytes < BYTES_PER_DECODE_MAX for changes in decoded)
