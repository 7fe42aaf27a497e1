"""TRUNCATE, logical messages and schema changes: rare, so they are read one by one.

Invariant: as with rows, every byte of a message is accounted for.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
import pyarrow as pa

from cdc.decoding.columns import PlacedError
from cdc.decoding.format import Wanted
from cdc.decoding.joins import repeated
from cdc.decoding.rows import DecodedGroup, Faults

_TRUNCATE = struct.Struct(">cIB")
_MESSAGE = struct.Struct(">cBQ")
_LENGTH = struct.Struct(">I")
_TRUNCATE_OPTIONS_MAX = 3  # CASCADE and RESTART IDENTITY


def decode_truncates(payloads: Sequence[bytes], oid: int, wanted: Wanted) -> DecodedGroup:
    """Truncates of the table ``oid``: nothing is left to say but that it happened."""
    for position, payload in enumerate(payloads):
        fault = _truncate_fault(payload, oid)
        if fault:
            raise PlacedError(position, fault)
    return _without_tuples(["{}"] * len(payloads), wanted, Faults())


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


def decode_schema_changes(payloads: Sequence[bytes], wanted: Wanted) -> DecodedGroup:
    """What the reader wrote of a table that changed: the kind byte, then the record."""
    records: list[str | None] = []
    for position, payload in enumerate(payloads):
        record = payload[1:]
        try:
            orjson.loads(record)
        except orjson.JSONDecodeError as fault:
            raise PlacedError(position, f"its record is not JSON ({fault.msg})") from None
        records.append(record.decode())
    return _without_tuples(records, wanted, Faults())


def decode_messages(payloads: Sequence[bytes], wanted: Wanted) -> DecodedGroup:
    """What ``pg_logical_emit_message`` wrote: prefix, content, and if it was transactional."""
    records: list[str | None] = []
    faults = Faults()
    for position, payload in enumerate(payloads):
        try:
            records.append(_message_record(payload))
        except UnicodeDecodeError as fault:
            records.append(None)
            faults.by_row[position] = ("prefix", f"this value is not UTF-8 ({fault.reason})")
        except ValueError as fault:
            raise PlacedError(position, str(fault)) from None
    return _without_tuples(records, wanted, faults)


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
    record: dict[str, object] = {"prefix": message.prefix.decode()}
    try:
        record["content"] = message.content.decode()
    except UnicodeDecodeError:
        record["content_base64"] = base64.b64encode(message.content).decode()
    record["transactional"] = message.flags == 1
    return orjson.dumps(record).decode()


def _without_tuples(records: Sequence[str | None], wanted: Wanted, faults: Faults) -> DecodedGroup:
    column = pa.array(records, pa.string())
    columns = {wanted.name("record", at): column for at in range(len(wanted.formats))}
    return DecodedGroup({**columns, "record_pks": repeated("[]", len(records))}, faults)
