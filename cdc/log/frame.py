"""One batch as bytes: a fixed header, then an Arrow IPC stream of raw pgoutput messages.

The header is the batch marker: it carries the batch's number, its row count and its bounds, the
upper one being the high watermark, exclusive. The checksum covers all of it and the body, so a
torn write and a flipped bit look the same: the frame is not whole.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from cdc.cursor import Cursor
from cdc.decoding.annotations import (
    ANNOTATIONS_KEY,
    Run,
    decode_annotations,
    encode_annotations,
)
from cdc.decoding.raw import RAW_SCHEMA, SCHEMAS_KEY, decode_schemas, encode_schemas
from cdc.errors import CorruptionError

_MAGIC = b"WBF1"
# magic, reserved, checksum; then what the checksum covers: body bytes, batch_idx, rows, bounds.
_PREFIX = struct.Struct("<4sIQ")
_MARKER = struct.Struct("<QQQQqQq")
HEADER_BYTES = _PREFIX.size + _MARKER.size

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

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.body_bytes


@dataclass(frozen=True)
class Frame:
    """A batch read back: its marker, its raw messages, and what was written beside them.

    That is the schemas that the messages need, and which of them carry an annotation.
    """

    marker: Marker
    raw: pa.RecordBatch
    schemas: Mapping[int, bytes]
    annotations: Sequence[Run]


def encode_frame(
    batch_idx: int,
    raw: pa.RecordBatch,
    schemas: Mapping[int, bytes],
    *,
    first: Cursor,
    high: Cursor,
    annotations: Sequence[Run] = (),
) -> tuple[Marker, bytes, pa.Buffer]:
    """The frame as marker, header and body; the two last are written one after the other."""
    metadata = {SCHEMAS_KEY: encode_schemas(dict(schemas))}
    if annotations:
        metadata[ANNOTATIONS_KEY] = encode_annotations(annotations)
    schema = RAW_SCHEMA.with_metadata(metadata)
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, schema) as stream:
        stream.write_batch(raw.replace_schema_metadata(metadata))
    body = out.getvalue()
    marker = Marker(batch_idx, raw.num_rows, first, high, body.size)
    fields = _MARKER.pack(body.size, batch_idx, raw.num_rows, *first, *high)
    return marker, _PREFIX.pack(_MAGIC, 0, _checksum(fields, body)) + fields, body


def read_marker(buffer: pa.Buffer, offset: int) -> Marker | None:
    """The marker at ``offset`` if a whole, undamaged frame starts there."""
    if offset + HEADER_BYTES > buffer.size:
        return None
    header = buffer.slice(offset, HEADER_BYTES).to_pybytes()
    magic, _reserved, checksum = _PREFIX.unpack_from(header)
    fields = header[_PREFIX.size :]
    body_bytes, batch_idx, rows, first_lsn, first_idx, high_lsn, high_idx = _MARKER.unpack(fields)
    if magic != _MAGIC or offset + HEADER_BYTES + body_bytes > buffer.size:
        return None
    if _checksum(fields, buffer.slice(offset + HEADER_BYTES, body_bytes)) != checksum:
        return None
    return Marker(
        batch_idx, rows, Cursor(first_lsn, first_idx), Cursor(high_lsn, high_idx), body_bytes
    )


def find_whole(buffer: pa.Buffer, start: int, batch_idx: int) -> int | None:
    """Where, beyond ``start``, a whole frame of a batch above ``batch_idx`` begins, if any does."""
    data = memoryview(buffer)[start:].tobytes()
    at = data.find(_MAGIC, 1)
    while at >= 0:
        marker = read_marker(buffer, start + at)
        if marker is not None and marker.batch_idx > batch_idx:
            return start + at
        at = data.find(_MAGIC, at + 1)
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
    body = buffer.slice(offset + HEADER_BYTES, marker.body_bytes)
    with pa.ipc.open_stream(body) as stream:
        raw = stream.read_next_batch()
    metadata = raw.schema.metadata
    said = metadata.get(ANNOTATIONS_KEY)
    annotations = () if said is None else decode_annotations(said, raw.num_rows)
    return Frame(marker, raw, decode_schemas(metadata[SCHEMAS_KEY]), annotations)


def _checksum(fields: bytes, body: pa.Buffer) -> int:
    digest = xxhash.xxh3_64(fields)
    digest.update(body)
    return digest.intdigest()
