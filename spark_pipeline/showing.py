"""What the lanes of a source let SQL say: who is served where, and who has a problem with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from cdc.connection import Connection
from cdc.state.health import Condition, report_conditions
from cdc.state.lanes import Standing, show_members, show_standing


class Showing:
    """Writes what has changed since it last wrote, and nothing else."""

    def __init__(self, source: str, term: int) -> None:
        self._source = source
        self._term = term
        self._standings: dict[str, Standing] = {}
        self._members: dict[str, list[str]] = {}
        self._ahead: frozenset[str] = frozenset()

    def show(
        self,
        state: Connection,
        standings: Mapping[str, Standing],
        members: Mapping[str, list[str]],
        ahead: Collection[str],
    ) -> None:
        """``standings`` of consumers, ``members`` of lanes, and who stands beyond the log's end."""
        for consumer, standing in standings.items():
            was = self._standings.get(consumer)
            same = was is not None and (was.lane, was.reason) == (standing.lane, standing.reason)
            if not same:
                show_standing(state, self._source, consumer, standing)
            if not same or (consumer in ahead) != (consumer in self._ahead):
                report_conditions(
                    state,
                    self._source,
                    self._term,
                    _conditions(consumer, standing, consumer in ahead),
                    consumer=consumer,
                    scope="lane_",
                )
        for lane, names in members.items():
            if self._members.get(lane) != names:
                show_members(state, self._source, lane, names)
        self._standings, self._members = dict(standings), dict(members)
        self._ahead = frozenset(ahead)


def _conditions(consumer: str, standing: Standing, ahead: bool) -> Iterator[Condition]:
    if standing.failing:
        yield Condition(
            "lane_failing",
            "warning",
            f"{consumer} is by itself: {standing.reason}",
            fix="it is tried again with pauses of up to 30 seconds; if the reason stays, mend it "
            "at the destination or in the configuration",
        )
    if standing.paused:
        yield Condition(
            "lane_paused",
            "warning",
            f"{consumer} is paused: it gets nothing until it is resumed. The change log keeps what "
            "it lacks, within its bounds; walbrook.gaps has what was given up",
            fix=f"walbrook resume {consumer}, or SELECT walbrook.resume('{consumer}')",
        )
    if ahead:
        yield Condition(
            "lane_ahead",
            "warning",
            f"the cursor of {consumer} stands beyond the end of the change log: it gets nothing "
            "until the log reaches it",
            fix="if that was not meant, move it back: walbrook.cursors shows where the others are",
        )
