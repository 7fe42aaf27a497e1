"""The messages of a Redis stream as the rows that they left."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import orjson
import pyarrow as pa
import redis

from cdc.backfill.table import PublishedTable
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import OperatorError
from cdc.verify.held import Key
from sinks.held_messages import HeldMessages
from sinks.redis_errors import from_exception
from sinks.redis_record import entry_cursor, entry_id

_ENTRIES_AT_ONCE: Final = 500
_FIELDS: Final = {b"record", b"changes", b"action", b"metadata"}


def read_stream(
    connection: Any, stream: str, table: PublishedTable, keys: Collection[Key] | None
) -> Iterator[pa.RecordBatch]:
    """The entries of a stream that are about a table, in their order; hangs up at the end."""
    try:
        connection.connect()
        yield from _held(connection, stream, table, keys)
    except (redis.RedisError, OSError) as error:
        raise from_exception(error) from error
    finally:
        connection.disconnect()


def _held(
    connection: Any, stream: str, table: PublishedTable, keys: Collection[Key] | None
) -> Iterator[pa.RecordBatch]:
    found = HeldMessages(table, keys)
    after = ORIGIN
    while True:
        connection.send_command("XRANGE", stream, entry_id(after), "+", "COUNT", _ENTRIES_AT_ONCE)
        entries = connection.read_response()
        for name, values in entries:
            fields = dict(zip(values[::2], values[1::2], strict=True))
            if not fields.keys() >= _FIELDS:
                raise OperatorError(
                    f"the stream {stream} has entries of another shape than sequin",
                    fix="compare a sink with shape: sequin",
                    kind="not_readable",
                )
            found.add(
                entry_cursor(name),
                fields[b"action"].decode(),
                fields[b"record"],
                fields[b"changes"],
                orjson.loads(fields[b"metadata"]),
            )
        if entries:
            last = entry_cursor(entries[-1][0])
            after = Cursor(last.lsn, last.idx + 1)
            yield found.take()
        if len(entries) < _ENTRIES_AT_ONCE:
            return
