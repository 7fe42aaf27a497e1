"""The rows of one transaction that has not ended, in a file that only grows.

A frame is a header (length and checksum), then an Arrow IPC stream of rows as they came, with the
Relation messages they need. Invariant: what is read back is what was written, or it
is reported as damaged.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import xxhash

from cdc.decoding.raw import SCHEMAS_KEY, decode_schemas, encode_schemas
from cdc.errors import CorruptionError
from cdc.log.files import private

SPILL_SCHEMA = pa.schema(
    [
        pa.field("xid", pa.int64(), nullable=False),  # of the subtransaction
        pa.field("hidden", pa.bool_(), nullable=False),  # takes a number but is not for the log
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("relation", pa.uint32(), nullable=False),
        pa.field("schema_id", pa.uint64(), nullable=False),  # xxh3_64 of the bare Relation message
        pa.field("payload", pa.binary(), nullable=False),  # as outside of a stream
    ]
)

_HEADER = struct.Struct("<4sIQQ")  # magic, reserved, checksum of the body, its bytes
_MAGIC = b"WBP1"


@dataclass(frozen=True)
class SpilledRows:
    """One frame read back; ``schemas``: bare Relation messages by their hash."""

    rows: pa.RecordBatch
    schemas: Mapping[int, bytes]


class SpillFile:
    """Rows of one transaction; the file is made with the first of them."""

    def __init__(self, path: Path, bytes_written: int = 0) -> None:
        self.path = path
        self.bytes = bytes_written

    def append(self, header: bytes, body: pa.Buffer) -> None:
        # Opened each time: any number of transactions may wait, and descriptors are few.
        with open(self.path, "ab" if self.bytes else "wb", opener=private) as file:
            file.write(header)
            file.write(body)
        self.bytes += len(header) + body.size

    def sync(self) -> None:
        """Put everything on disk."""
        if self.bytes:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def frames(self) -> Iterator[SpilledRows]:
        """Everything written, one frame in memory at a time."""
        if not self.bytes:
            return
        if not self.path.exists():
            raise self._damaged(0)
        with self.path.open("rb") as file:
            at = 0
            while at < self.bytes:
                body = self._body(file, at)
                at += _HEADER.size + len(body)
                with pa.ipc.open_stream(pa.py_buffer(body)) as stream:
                    rows = stream.read_next_batch()
                yield SpilledRows(rows, decode_schemas(rows.schema.metadata[SCHEMAS_KEY]))

    def _body(self, file: BinaryIO, at: int) -> bytes:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise self._damaged(at)
        magic, _reserved, checksum, size = _HEADER.unpack(header)
        if magic != _MAGIC or size > self.bytes - at - _HEADER.size:
            raise self._damaged(at)
        body = file.read(size)
        if len(body) < size or xxhash.xxh3_64_intdigest(body) != checksum:
            raise self._damaged(at)
        return body

    def _damaged(self, at: int) -> CorruptionError:
        return CorruptionError(
            f"the spilled rows at byte {at} of {self.path} do not match their checksum",
            fix="check the disk; a streamed transaction is sent again at the next connection. A "
            "prepared one has to be restored from a copy of the log directory; or, with the "
            "service stopped, let its changes go: walbrook.accept_gap, with an LSN behind its "
            "commit",
            kind="spill_damaged",
        )


def encode_spilled(rows: pa.RecordBatch, schemas: Mapping[int, bytes]) -> tuple[bytes, pa.Buffer]:
    """A frame as header and body; ``rows`` of SPILL_SCHEMA."""
    metadata = {SCHEMAS_KEY: encode_schemas(schemas)}
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, SPILL_SCHEMA.with_metadata(metadata)) as stream:
        stream.write_batch(rows.replace_schema_metadata(metadata))
    body = out.getvalue()
    return _HEADER.pack(_MAGIC, 0, xxhash.xxh3_64_intdigest(body), body.size), body
