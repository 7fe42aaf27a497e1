"""Places in the log, and where a user's own job begins and ends.

Invariant: a place that the log can no longer be read from is refused, never silently
moved to the next one. The log takes no notice of such jobs: it may let go what they have not
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdc.cursor import Cursor
from cdc.errors import ConfigError, GapError
from cdc.log.view import LogReader
from spark_pipeline.source.options import Options


@dataclass(frozen=True)
class Offset:
    """A place between two batches of one history of the log.

    ``cursor`` is within the batch that begins or ended there: a stream's first range begins, and a
    read's range ends, at a cursor that may stand in the middle of a batch.
    """

    batch: int
    history: int
    cursor: Cursor | None = None

    def to_json(self) -> dict[str, Any]:
        """As Spark keeps it in a checkpoint."""
        place = {"batch": self.batch, "history": self.history}
        return place if self.cursor is None else place | {"cursor": str(self.cursor)}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Offset:
        cursor = Cursor.parse(said["cursor"]) if "cursor" in said else None
        return cls(int(said["batch"]), int(said["history"]), cursor)


def starting(view: LogReader, options: Options) -> Offset:
    """The first batch, and the cursor in it."""
    history = view.history()
    if not history:
        raise ConfigError(
            f"there is no log at {options.path}",
            fix="give the path of one source's log: <log.directory>/<database name>",
        )
    place = options.starting
    if place == "earliest":
        return Offset(view.first_batch(), history)
    if place == "latest":
        return Offset(view.next_batch(), history)
    earliest, _ = view.floors()
    if place < earliest:
        raise removed(f"the log at {options.path} begins at {earliest}: changes from {place} on")
    return Offset(view.seek(place), history, place)


def ending(view: LogReader, options: Options) -> Offset:
    """Behind the last batch, and the cursor in it below which rows are read."""
    end, history, place = view.next_batch(), view.history(), options.ending
    if place == "latest":
        return Offset(end, history)
    if place == "earliest" or (isinstance(options.starting, Cursor) and place < options.starting):
        raise ConfigError(
            f"the option endingCursor ({place}) lies before startingCursor ({options.starting})",
            fix="read from the lower to the higher: the end itself is not read",
        )
    return Offset(min(end, view.seek(place) + 1), history, place)


def removed(what: str) -> GapError:
    """The log has let go what the job had not read."""
    return GapError(
        f"{what} were removed before this job read them",
        fix="bring what is missing from the source by other means, then start with a new "
        "checkpoint and startingCursor earliest; a higher log.retain_s or log.retain_bytes keeps "
        "more for jobs like this one",
        kind="log_gap",
    )
