"""The options of the source ``walbrook``: what they are called, and what they may say.

Spark hands options over as text, under names whose case it may have changed. Invariant:
an option that is misspelt or says nothing usable is refused, by name and with what to write.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from cdc.cursor import Cursor
from cdc.decoding.format import PLAIN, Wanted
from cdc.errors import ConfigError, OperatorError

Place = Cursor | Literal["earliest", "latest"]

_DEFAULTS = {
    "path": "",
    "table": "",
    "startingCursor": "earliest",
    "endingCursor": "latest",
    "maxRows": "200000",
    "maxBytes": str(128 << 20),
    "targetMs": "0",
    "partitions": "",
    # For the service's own query alone.
    "startingBatch": "",
    "endingBatch": "",
    "startingHistory": "",
    "exchange": "",
    "markers": "",
    "executorPath": "",
    "wanted": PLAIN.to_text(),
}
_OURS = (
    "startingBatch", "endingBatch", "startingHistory", "exchange", "markers", "executorPath",
    "wanted",
)  # fmt: skip
_NAMES = {name.lower(): name for name in _DEFAULTS}


@dataclass(frozen=True)
class Options:
    """The options, read and checked."""

    path: str
    table: tuple[str, str] | None  # schema and name
    starting: Place
    ending: Place
    rows_max: int
    bytes_max: int
    target_s: float
    partitions: int
    starting_batch: int | None
    ending_batch: int | None
    starting_history: int | None
    exchange: str
    markers: bool  # among the rows, which go through Spark
    executor_path: str  # what partitions read in place of ``path``
    wanted: Wanted

    @property
    def for_service(self) -> bool:
        """Whether the service's own query asks."""
        return bool(self.exchange) or self.markers

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Options:
        """Options as Spark hands them over."""
        said = dict(_DEFAULTS)
        for key, value in given.items():
            said[_known(key)] = value
        if not said["path"]:
            raise ConfigError(
                "the source walbrook was given no path",
                fix='add .option("path", "<log.directory>/<database name>")',
            )
        table = _table(said["table"])
        if table is not None and (said["exchange"] or said["markers"]):
            raise ConfigError(
                "the options table and exchange or markers exclude each other",
                fix="leave those out: they are for the service's own query",
            )
        return cls(
            path=said["path"],
            table=table,
            starting=_place("startingCursor", said),
            ending=_place("endingCursor", said),
            rows_max=_whole("maxRows", said, 1),
            bytes_max=_whole("maxBytes", said, 1),
            target_s=_whole("targetMs", said, 0) / 1000,
            partitions=_whole("partitions", said, 1) if said["partitions"] else _processors(),
            starting_batch=_whole("startingBatch", said, 0) if said["startingBatch"] else None,
            ending_batch=_whole("endingBatch", said, 0) if said["endingBatch"] else None,
            starting_history=(
                _whole("startingHistory", said, 0) if said["startingHistory"] else None
            ),
            exchange=said["exchange"],
            markers=said["markers"] == "true",
            executor_path=said["executorPath"] or said["path"],
            wanted=Wanted.from_text(said["wanted"]),
        )


def in_process_options(log: Path, exchange: Path, wanted: Wanted = PLAIN) -> Options:
    """For use outside Spark: one partition, decoded slices by reference."""
    given = {"path": str(log), "exchange": str(exchange), "partitions": "1"}
    return Options.read(given | {"wanted": wanted.to_text()})


def driver_options(log: Path, wanted: Wanted) -> Options:
    """For the driver's own decoding: one partition, rows with their markers."""
    given = {"path": str(log), "markers": "true", "partitions": "1"}
    return Options.read(given | {"wanted": wanted.to_text()})


def _known(key: str) -> str:
    name = _NAMES.get(key.lower())
    if name is None:
        public = [name for name in _DEFAULTS if name not in _OURS]
        near = get_close_matches(key.lower(), _NAMES, n=1)
        raise ConfigError(
            f"the source walbrook has no option {key!r}",
            fix=f"write {_NAMES[near[0]]}" if near else f"use some of {', '.join(public)}",
        )
    return name


def _whole(name: str, said: Mapping[str, str], least: int) -> int:
    text = said[name].strip()
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ConfigError(
            f"the option {name} is {said[name]!r}", fix=f"write a whole number from {least} on"
        )
    return int(text)


def _place(name: str, said: Mapping[str, str]) -> Place:
    text = said[name].strip()
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    try:
        return Cursor.parse(text)
    except OperatorError:
        raise ConfigError(
            f"the option {name} is {said[name]!r}",
            fix="write earliest, latest or a cursor such as 16/B374D848:3",
        ) from None


def _table(text: str) -> tuple[str, str] | None:
    if not text:
        return None
    schema, _, name = text.partition(".")
    if not schema or not name:
        raise ConfigError(
            f"the option table is {text!r}", fix="write schema and table, such as public.item"
        )
    return schema, name


def _processors() -> int:
    """How many cores this machine lets us use: right where Spark runs on it alone."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
