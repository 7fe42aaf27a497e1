"""Reading the sinks back: every message in the order in which a reader of the sink meets it.

A message is the JSON text that was delivered, not parsed here, so that no digit is lost on the way
to the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
import orjson
import pyarrow.dataset as ds
import redis

from demo.latency import ArrivalWatch, Seconds
from demo.servers import STREAM_KEY, ExampleServers

_PAGE: Final = 2000
_METADATA: Final = (
    "table_schema", "table_name", "xid", "commit_lsn", "commit_idx", "commit_timestamp",
)  # fmt: skip
Entry = tuple[bytes, dict[bytes, bytes]]


@dataclass(frozen=True)
class Collected:
    """What one sink holds, and when each message was there, in seconds since 1970."""

    sink: str
    messages: list[bytes]
    arrived_at: Seconds


def collect(servers: ExampleServers, clock: ArrivalWatch) -> list[Collected]:
    """What every sink of the example holds."""
    lines = from_files(servers.file_directory)
    ends = np.cumsum([len(line) + 1 for line in lines], dtype=np.int64)
    found = [
        Collected("file", lines, clock.file_bytes.reached(ends)),
        Collected("parquet", *from_parquet(servers.parquet_directory)),
    ]
    if servers.redis is not None:
        entries = from_redis(servers.redis.url)
        places = np.arange(1, len(entries) + 1)
        found.append(Collected("redis", entries, clock.stream_entries.reached(places)))
    return found


def from_files(directory: Path) -> list[bytes]:
    """The lines of the files, which sort in the order they were written."""
    return [
        line
        for path in sorted(directory.glob("changes-*.jsonl"))
        for line in path.read_bytes().split(b"\n")[:-1]
    ]


def from_parquet(directory: Path) -> tuple[list[bytes], Seconds]:
    """The rows of the files and when each file got its place.

    Within a table the files sort in the order they were written.
    """
    paths = sorted(str(path) for path in directory.glob("table=*/date=*/*.parquet"))
    if not paths:
        return [], np.empty(0)
    columns = [*_METADATA, "action", "record", "changes", "record_pks", "__filename"]
    rows = ds.dataset(paths, format="parquet").to_table(columns=columns)
    # Being moved to its place is the last thing that changed the file.
    placed = {path: Path(path).stat().st_ctime for path in paths}
    times = np.array([placed[name] for name in rows.column("__filename").to_pylist()])
    return [_message(row) for row in rows.to_pylist()], times


def _message(row: dict[str, object]) -> bytes:
    metadata = {name: row[name] for name in _METADATA}
    metadata["record_pks"] = orjson.Fragment(str(row["record_pks"]))
    return orjson.dumps(
        {
            "action": row["action"],
            "record": orjson.Fragment(str(row["record"])),
            "changes": orjson.Fragment("null" if row["changes"] is None else str(row["changes"])),
            "metadata": metadata,
        }
    )


def from_redis(url: str) -> list[bytes]:
    """The entries of the stream."""
    with redis.Redis.from_url(url) as client:
        return [_entry(fields) for _, fields in _pages(client)]


def _pages(client: redis.Redis) -> Iterator[Entry]:
    after = "-"
    while True:
        page = cast("list[Entry]", client.xrange(STREAM_KEY, min=after, count=_PAGE))
        yield from page
        if len(page) < _PAGE:
            return
        after = f"({page[-1][0].decode()}"


def _entry(fields: dict[bytes, bytes]) -> bytes:
    action = orjson.dumps(fields[b"action"].decode())
    return b'{"record":%b,"changes":%b,"action":%b,"metadata":%b}' % (
        fields[b"record"], fields[b"changes"], action, fields[b"metadata"],
    )  # fmt: skip
