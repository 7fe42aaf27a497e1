"""What decode is handed: the columns of one log frame, and the schemas that its rows need.

A frame can be read alone: the raw Relation messages of its rows travel with it, in the metadata
of its Arrow schema under ``SCHEMAS_KEY``. Invariant: ``decode_schemas`` gives back
exactly what ``encode_schemas`` took, and refuses every other sequence of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import pyarrow as pa

from cdc.errors import DecodeError

RAW_SCHEMA = pa.schema(
    [
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("commit_idx", pa.int64(), nullable=False),
        pa.field("commit_ts", pa.int64(), nullable=False),  # unix microseconds, UTC
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),  # ord of I, U, D, T, M, S or R
        pa.field("relation", pa.uint32(), nullable=False),  # oid; 0 for M
        pa.field("schema_id", pa.uint64(), nullable=False),  # xxh3_64 of its Relation; 0 for M
        pa.field("payload", pa.binary(), nullable=False),  # the message, from its kind byte on
    ]
)
"""One row per change. A TRUNCATE of several tables is one row per table, each a message of its own.

A schema change (S) is no message of the source: the reader writes it, and the kind byte is followed
by the JSON of its record. Its schema is that of the new version.

A row that a backfill read (R) has the form of an insert. It is never in the log.
"""

SCHEMA_CHANGE = ord("S")
"""The kind of a schema change."""

SCHEMAS_KEY = b"walbrook.schemas"
"""Where the encoded schemas stand in the metadata of a frame's Arrow schema."""

_MAGIC = b"WBS1"
_COUNT = struct.Struct(">I")
_ENTRY = struct.Struct(">QI")


def encode_schemas(schemas: Mapping[int, bytes]) -> bytes:
    """Schema id → raw Relation message, as one run of bytes: the same schemas, the same bytes."""
    parts = [_MAGIC, _COUNT.pack(len(schemas))]
    for schema_id, message in sorted(schemas.items()):
        parts += (_ENTRY.pack(schema_id, len(message)), message)
    return b"".join(parts)


def decode_schemas(data: bytes) -> dict[int, bytes]:
    """Read what ``encode_schemas`` wrote."""
    header = len(_MAGIC) + _COUNT.size
    if len(data) < header or not data.startswith(_MAGIC):
        raise _broken("it does not start as one")
    (count,) = _COUNT.unpack_from(data, len(_MAGIC))
    schemas: dict[int, bytes] = {}
    at = header
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise _broken(f"it ends before schema {len(schemas) + 1} of {count}")
        schema_id, length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        if at + length > len(data):
            raise _broken(f"schema {schema_id} is cut off")
        if schema_id in schemas:
            raise _broken(f"schema {schema_id} is there twice")
        schemas[schema_id] = data[at : at + length]
        at += length
    if at != len(data):
        raise _broken(f"{len(data) - at} bytes follow its last schema")
    return schemas


def _broken(why: str) -> DecodeError:
    return DecodeError(
        f"The schemas of a frame cannot be read: {why}",
        fix="the frame was written by another version or is damaged; read it from the slot again",
    )
