"""A frame: what was written beside its rows is read back, and frames of before still are."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.cursor import Cursor
from cdc.decoding.annotations import AnnotationRun
from cdc.decoding.raw import RAW_SCHEMA, SCHEMAS_KEY, encode_schemas
from cdc.errors import DecodeError
from cdc.log.frame import Frame, encode_frame, read_frame
from tests.unit.log.batches import SCHEMAS, rows

RUNS = (AnnotationRun(1, 3, b'{"user":"ann"}'), AnnotationRun(4, 5, b"7"))


def written(
    raw: pa.RecordBatch, annotations: tuple[AnnotationRun, ...] = ()
) -> tuple[bytes, pa.Buffer]:
    first, high = Cursor(10, 0), Cursor(10, raw.num_rows)
    _marker, header, body = encode_frame(
        3, raw, SCHEMAS, first=first, high=high, annotations=annotations
    )
    return header, body


def read(header: bytes, body: pa.Buffer) -> Frame:
    return read_frame(pa.py_buffer(header + body.to_pybytes()), 0, where="here")


def test_annotations_are_read_back_with_the_rows_and_their_schemas() -> None:
    frame = read(*written(rows(10, 5), RUNS))
    assert frame.annotations == RUNS
    assert frame.raw.equals(rows(10, 5))
    assert frame.schemas == SCHEMAS


def test_a_frame_without_annotations_is_as_it_was_before_there_were_any() -> None:
    before = RAW_SCHEMA.with_metadata({SCHEMAS_KEY: encode_schemas(SCHEMAS)})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, before) as stream:
        stream.write_batch(rows(10, 5).replace_schema_metadata(before.metadata))
    header, body = written(rows(10, 5))
    assert body.equals(out.getvalue())
    assert read(header, body).annotations == ()


@pytest.mark.parametrize("said", [b"", b"WBA1", b"nonsense"])
def test_annotations_that_cannot_be_read_are_an_error_not_a_frame_without(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.frame.encode_annotations", lambda _runs: said)
    header, body = written(rows(10, 5), RUNS)
    with pytest.raises(DecodeError, match="annotations of a frame cannot be read"):
        read(header, body)


def test_a_frame_says_when_it_was_logged() -> None:
    first, high = Cursor(10, 0), Cursor(10, 5)
    marker, header, body = encode_frame(
        3, rows(10, 5), SCHEMAS, first=first, high=high, logged_us=1_700_000_000_123_456
    )
    assert marker.frame_bytes == len(header) + body.size
    frame = read(header, body)
    assert frame.marker == marker
    assert frame.marker.logged_us == 1_700_000_000_123_456
    assert frame.raw.equals(rows(10, 5))


def test_a_frame_of_an_earlier_version_is_read_without_a_time() -> None:
    header, body = written(rows(10, 5))
    assert header.startswith(b"WBF1")
    frame = read(header, body)
    assert (frame.marker.logged_us, frame.marker.rows) == (0, 5)
