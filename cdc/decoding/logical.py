"""TRUNCATE and logical messages: rare, so they are read one by one.

What must always hold: as with rows, every byte of a message is accounted for.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
import pyarrow as pa

from cdc.decoding.columns import PlacedError
from cdc.decoding.rows import Decoded

_TRUNCATE = struct.Struct(">cIB")
_MESSAGE = struct.Struct(">cBQ")
_LENGTH = struct.Struct(">I")
_TRUNCATE_OPTIONS_MAX = 3  # CASCADE and RESTART IDENTITY


def decode_truncates(payloads: Sequence[bytes], oid: int) -> Decoded:
    """Truncates of the table ``oid``: nothing is left to say but that it happened."""
    for position, payload in enumerate(payloads):
        fault = _truncate_fault(payload, oid)
        if fault:
            raise PlacedError(position, fault)
    return _without_tuples(["{}"] * len(payloads))


def _truncate_fault(payload: bytes, oid: int) -> str:
    if len(payload) < _TRUNCATE.size:
        return "its message is cut off"
    _, count, options = _TRUNCATE.unpack_from(payload)
    if len(payload) != _TRUNCATE.size + 4 * count:
        return f"its message does not hold the {count} tables that it names"
    if options > _TRUNCATE_OPTIONS_MAX:
        return f"its options {options} are not known"
    tables = struct.unpack_from(f">{count}I", payload, _TRUNCATE.size)
    return "" if oid in tables else f"its message does not name the table {oid}"


def decode_messages(payloads: Sequence[bytes]) -> Decoded:
    """What ``pg_logical_emit_message`` wrote: prefix, content, and if it was transactional."""
    records = []
    for position, payload in enumerate(payloads):
        try:
            records.append(_message_record(payload))
        except ValueError as fault:
            raise PlacedError(position, str(fault)) from None
    return _without_tuples(records)


@dataclass(frozen=True)
class LogicalMessage:
    """The parts of a message, as the source wrote them."""

    flags: int  # 0 outside of transactions
    prefix: bytes
    content: bytes


def parse_message(payload: bytes) -> LogicalMessage:
    """Read one whole message; ValueError says what is wrong with it."""
    if len(payload) < _MESSAGE.size:
        raise ValueError("its message is cut off")
    _, flags, _ = _MESSAGE.unpack_from(payload)
    stop = payload.find(b"\0", _MESSAGE.size)
    start = stop + 1 + _LENGTH.size
    if stop < 0 or start > len(payload):
        raise ValueError("its message is cut off")
    (length,) = _LENGTH.unpack_from(payload, stop + 1)
    if start + length != len(payload):
        raise ValueError(f"its content is not the {length} bytes long that it says")
    return LogicalMessage(flags, payload[_MESSAGE.size : stop], payload[start:])


def _message_record(payload: bytes) -> str:
    message = parse_message(payload)
    if message.flags > 1:
        raise ValueError(f"its flags {message.flags} are not known")
    try:
        prefix = message.prefix.decode()
    except UnicodeDecodeError:
        raise ValueError("its prefix is not UTF-8") from None
    record: dict[str, object] = {"prefix": prefix}
    try:
        record["content"] = message.content.decode()
    except UnicodeDecodeError:
        record["content_base64"] = base64.b64encode(message.content).decode()
    record["transactional"] = message.flags == 1
    return orjson.dumps(record).decode()


def _without_tuples(records: list[str]) -> Decoded:
    nothing = pa.nulls(len(records), pa.string())
    return Decoded(pa.array(records, pa.string()), nothing, pa.repeat("[]", len(records)), nothing)
