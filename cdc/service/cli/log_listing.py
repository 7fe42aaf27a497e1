"""What ``walbrook log ls`` shows: a log's bounds and its segments, from the manifest."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from cdc.cursor import Cursor
from cdc.errors import CorruptionError, OperatorError
from cdc.log.manifest import FILE_NAME, Manifest, SegmentInfo, read_manifest, stamp_of
from cdc.log.segment import (
    data_path,
    high_of,
    index_length,
    index_path,
    map_file,
    read_entries,
    scan,
)
from cdc.log.sync import read_durable

_LOOKS_MAX = 5


class Segment(TypedDict):
    """A segment as JSON."""

    tier: str
    place: str | None
    name: str
    term: int
    first_batch: int
    batches: int
    rows: int
    bytes: int
    first: str
    high: str
    commit_from: str | None
    commit_to: str | None
    sealed_at: str | None


class LogListing(TypedDict):
    """A log as JSON; cursors are exclusive ends, as everywhere."""

    source: str
    directory: str
    history: int
    term: int
    earliest: str
    evicted: str
    durable_end: str | None
    end: str
    next_batch: int
    rows: int
    bytes: int
    segments: list[Segment]


def describe_log(source: str, directory: Path) -> LogListing:
    """Everything that is known of it at one moment."""
    for _ in range(_LOOKS_MAX):
        before = stamp_of(str(directory / FILE_NAME))
        manifest = read_manifest(directory)
        active = _active(directory, manifest or Manifest())
        # Sealing or trimming meanwhile would show a batch twice, or a hole.
        if stamp_of(str(directory / FILE_NAME)) == before:
            break
    if manifest is None:
        raise no_manifest(directory)
    segments = [_described(info, sealed=True) for info in manifest.segments]
    segments.append(_described(active, sealed=False))
    return LogListing(
        source=source,
        directory=str(directory),
        history=manifest.history,
        term=manifest.term,
        earliest=str(manifest.earliest),
        evicted=str(manifest.evicted),
        durable_end=_durable_end(directory),
        end=str(active.high),
        next_batch=active.next_batch,
        rows=sum(segment["rows"] for segment in segments),
        bytes=sum(segment["bytes"] for segment in segments),
        segments=segments,
    )


def no_manifest(directory: Path) -> OperatorError:
    return OperatorError(
        f"the log in {directory} has no manifest",
        fix="start the service: it makes the manifest, from the segments if there are any",
    )


def show_log(log: LogListing, console: Console) -> None:
    """The same for people."""
    bounds = Table.grid(padding=(0, 2))
    for name, value in (
        ("source", log["source"]),
        ("directory", log["directory"]),
        ("history, term", f"{log['history']}, {log['term']}"),
        ("earliest", log["earliest"]),
        ("evicted below", log["evicted"]),
        ("durable end", log["durable_end"] or "cannot be read: run walbrook log verify"),
        ("end", f"{log['end']} (next batch {log['next_batch']})"),
        ("size", f"{log['rows']:,} rows, {decimal(log['bytes'])}"),
    ):
        bounds.add_row(f"[bold]{name}", value)
    table = Table("tier", "first batch", "batches", "rows", "size", "from", "to")
    for heading in ("first commit (UTC)", "last commit", "sealed"):
        table.add_column(heading)
    for segment in log["segments"]:
        table.add_row(
            segment["tier"],
            str(segment["first_batch"]),
            f"{segment['batches']:,}",
            f"{segment['rows']:,}",
            decimal(segment["bytes"]),
            segment["first"],
            segment["high"],
            _short(segment["commit_from"]),
            _short(segment["commit_to"]),
            _short(segment["sealed_at"]) or "active",
        )
    console.print(bounds)
    console.print(table)


def _active(directory: Path, manifest: Manifest) -> SegmentInfo:
    """The active segment as far as its index goes."""
    begun, path = manifest.begun, index_path(directory, manifest.active_name)
    # Counted once: it may be sealed and trimmed between two looks.
    entries = read_entries(path, 0, index_length(path))
    if not len(entries):
        return begun
    try:
        data = map_file(data_path(directory, manifest.active_name))
        commits = scan(data, begun.first_batch, batches=len(entries)).commits
    except FileNotFoundError:
        commits = (0, 0)
    return replace(
        begun,
        batches=len(entries),
        rows=int(entries["rows"].sum()),
        bytes=int(entries["bytes"].sum()),
        first=Cursor(*map(int, entries[["first_lsn", "first_idx"]][0])),
        high=high_of(entries[-1]),
        commit_from_us=commits[0],
        commit_to_us=commits[1],
    )


def _described(info: SegmentInfo, *, sealed: bool) -> Segment:
    return Segment(
        tier="cold" if info.place else "hot",
        place=info.place or None,
        name=info.name,
        term=info.term,
        first_batch=info.first_batch,
        batches=info.batches,
        rows=info.rows,
        bytes=info.bytes,
        first=str(info.first),
        high=str(info.high),
        commit_from=_moment(info.commit_from_us / 1e6) if info.commit_from_us else None,
        commit_to=_moment(info.commit_to_us / 1e6) if info.commit_to_us else None,
        sealed_at=_moment(info.sealed_at) if sealed else None,
    )


def _durable_end(directory: Path) -> str | None:
    try:
        return str(read_durable(directory))
    except CorruptionError:
        return None


def _short(moment: str | None) -> str:
    return moment.replace("T", " ").removesuffix("+00:00") if moment else ""


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
