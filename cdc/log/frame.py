"""One batch as bytes: a fixed header, then an Arrow IPC stream of raw pgoutput messages.

The header is the batch marker: it carries the batch's number, its row count and its bounds, the
upper one being the high watermark, exclusive, and the time at which the batch was logged. The
checksum covers all of it and the body, so a torn write and a flipped bit look the same: the frame
is not whole. Frames of earlier versions have no time, and are read as well.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import pyarrow as pa
import xxhash

from cdc.cursor import Cursor
from cdc.decoding.annotations import (
    ANNOTATIONS_KEY,
    AnnotationRun,
    decode_annotations,
    encode_annotations,
)
from cdc.decoding.raw import RAW_SCHEMA, SCHEMAS_KEY, decode_schemas, encode_schemas
from cdc.errors import CorruptionError

_ANY_MAGIC = b"WBF"
_UNTIMED, _TIMED = b"WBF1", b"WBF2"
# magic, reserved, checksum; then what the checksum covers: body bytes, batch_idx, rows, bounds,
# and, in a timed frame, when it was logged.
_PREFIX = struct.Struct("<4sIQ")
_MARKERS = {_UNTIMED: struct.Struct("<QQQQqQq"), _TIMED: struct.Struct("<QQQQqQqq")}
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # of every Arrow IPC stream
# How each message of an Arrow IPC stream begins: a mark, then the size of what describes it.
_MESSAGE = struct.Struct("<iI")
_KNOWN_HEAD_BYTES = 16 << 10

LOST_FIX = (
    "restore the segment from a copy; or remove the source's log directory: what the slot still "
    "has is then read again, and what was confirmed to it (with log.durability fsync all that was "
    "synced, else only what was delivered) is gone: bring consumers that lack it up to date by "
    "other means"
)
"""What to do about frames that cannot be had again from anywhere here."""


@dataclass(frozen=True)
class Marker:
    """What a frame's header says of its batch; ``high`` is exclusive."""

    batch_idx: int
    rows: int
    first: Cursor
    high: Cursor
    body_bytes: int
    logged_us: int = 0  # when it was logged, Unix microseconds; 0: not noted

    @property
    def header_bytes(self) -> int:
        return _PREFIX.size + _MARKERS[_TIMED if self.logged_us else _UNTIMED].size

    @property
    def frame_bytes(self) -> int:
        return self.header_bytes + self.body_bytes


@dataclass(frozen=True)
class Frame:
    """A batch read back: its marker, its raw messages, and what was written beside them.

    That is the schemas that the messages need, and which of them carry an annotation.
    """

    marker: Marker
    raw: pa.RecordBatch
    schemas: Mapping[int, bytes]
    annotations: Sequence[AnnotationRun]


def encode_frame(
    batch_idx: int,
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    *,
    first: Cursor,
    high: Cursor,
    annotations: Sequence[AnnotationRun] = (),
    logged_us: int = 0,
) -> tuple[Marker, bytes, pa.Buffer]:
    """The frame as marker, header and body; the two last are written one after the other."""
    known = encode_schemas(dict(schemas))
    said = {ANNOTATIONS_KEY: encode_annotations(annotations)} if annotations else None
    head = _usual_head(known) if said is None else _stream_head({SCHEMAS_KEY: known, **said})
    body = pa.py_buffer(b"".join((head, raw.serialize(), _STREAM_END)))
    marker = Marker(batch_idx, raw.num_rows, first, high, body.size, logged_us)
    values = (body.size, batch_idx, raw.num_rows, *first, *high)
    if logged_us:
        magic, fields = _TIMED, _MARKERS[_TIMED].pack(*values, logged_us)
    else:
        magic, fields = _UNTIMED, _MARKERS[_UNTIMED].pack(*values)
    return marker, _PREFIX.pack(magic, 0, _checksum(fields, body)) + fields, body


@lru_cache(maxsize=64)
def _usual_head(schemas: bytes) -> bytes:
    """The same for most batches of a table: those without annotations."""
    return _stream_head({SCHEMAS_KEY: schemas})


def _stream_head(metadata: Mapping[bytes, bytes]) -> bytes:
    """What an Arrow IPC stream of raw messages begins with."""
    return bytes(RAW_SCHEMA.with_metadata(metadata).serialize())


def read_marker(buffer: pa.Buffer, offset: int) -> Marker | None:
    """The marker at ``offset`` if a whole, undamaged frame starts there."""
    if offset + _PREFIX.size > buffer.size:
        return None
    magic, _reserved, checksum = _PREFIX.unpack(buffer.slice(offset, _PREFIX.size).to_pybytes())
    form = _MARKERS.get(magic)
    begins = offset + _PREFIX.size
    if form is None or begins + form.size > buffer.size:
        return None
    fields = buffer.slice(begins, form.size).to_pybytes()
    body_bytes, batch_idx, rows, first_lsn, first_idx, high_lsn, high_idx, *logged = form.unpack(
        fields
    )
    if begins + form.size + body_bytes > buffer.size:
        return None
    if _checksum(fields, buffer.slice(begins + form.size, body_bytes)) != checksum:
        return None
    first, high = Cursor(first_lsn, first_idx), Cursor(high_lsn, high_idx)
    return Marker(batch_idx, rows, first, high, body_bytes, *logged)


def find_whole(buffer: pa.Buffer, start: int, batch_idx: int) -> int | None:
    """Where, beyond ``start``, a whole frame of a batch above ``batch_idx`` begins, if any does."""
    data = memoryview(buffer)[start:].tobytes()
    at = data.find(_ANY_MAGIC, 1)
    while at >= 0:
        marker = read_marker(buffer, start + at)
        if marker is not None and marker.batch_idx > batch_idx:
            return start + at
        at = data.find(_ANY_MAGIC, at + 1)
    return None


def read_frame(buffer: pa.Buffer, offset: int, *, where: str) -> Frame:
    """The frame at ``offset``; anything but a whole frame is corruption, named by ``where``."""
    marker = read_marker(buffer, offset)
    if marker is None:
        raise CorruptionError(
            f"the frame at byte {offset} of {where} does not match its checksum",
            fix=LOST_FIX,
        )
    return open_frame(buffer, offset, marker)


def open_frame(buffer: pa.Buffer, offset: int, marker: Marker) -> Frame:
    """The frame at ``offset``, whose ``marker`` was read and so is whole."""
    body = buffer.slice(offset + marker.header_bytes, marker.body_bytes)
    _continuation, size = _MESSAGE.unpack_from(body)
    head = body.slice(0, _MESSAGE.size + size).to_pybytes()
    schema, schemas = (_known_head if len(head) <= _KNOWN_HEAD_BYTES else _read_head)(head)
    raw = pa.ipc.read_record_batch(body.slice(len(head)), schema)
    said = schema.metadata.get(ANNOTATIONS_KEY)
    annotations = () if said is None else decode_annotations(said, raw.num_rows)
    return Frame(marker, raw, schemas, annotations)


def _read_head(head: bytes) -> tuple[pa.Schema, Mapping[int, bytes]]:
    """The schema that a stream begins with, and those that its messages need."""
    schema = pa.ipc.read_schema(pa.py_buffer(head))
    return schema, MappingProxyType(decode_schemas(schema.metadata[SCHEMAS_KEY]))


_known_head = lru_cache(maxsize=64)(_read_head)
"""Most frames of a table begin with the same."""


def _checksum(fields: bytes, body: pa.Buffer) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(body)
    return digest.intdigest()
