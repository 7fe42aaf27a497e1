"""What a look at the consumers' rows changes: who leaves a lane, who waits, who is held back."""

from __future__ import annotations

import pytest

from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.state.lanes import SHARED
from cdc.state.roll import Roll
from spark_pipeline.looking import dismiss, reconsider
from spark_pipeline.members import Departure, Members, Why
from spark_pipeline.roster import Roster

LOW, HIGH = Cursor(1, 0), Cursor(2, 0)
PAUSED = Roll({}, {"a": HIGH})
SERVED = Roll({"a": HIGH}, {})


@pytest.mark.parametrize(
    ("roll", "why"),
    [
        (SERVED, None),
        (PAUSED, "paused"),
        (Roll({}, {}), "inactive"),
        (Roll({"a": LOW}, {}), "moved"),
        (Roll({"a": HIGH}, {}, frozenset("a")), "gap"),
        (Roll({}, {"a": LOW}, frozenset("a")), "paused"),
    ],
)
def test_a_lane_lets_go_of_whom_it_must_not_serve_on(roll: Roll, why: Why | None) -> None:
    told: list[Departure] = []
    members = Members(told.append)
    members.admit({"a": HIGH})
    members.begin()
    dismiss(members, members.cursors, roll)
    assert told == [], "a micro-batch is under way"
    members.end()
    assert told == ([Departure("a", why)] if why else [])


@pytest.mark.parametrize(
    ("roll", "why"),
    [(SERVED, None), (PAUSED, "paused"), (Roll({"a": LOW}, {}, frozenset("a")), "gap")],
)
def test_one_that_was_invited_and_has_not_joined_is_let_go_too(roll: Roll, why: Why | None) -> None:
    told: list[Departure] = []
    members = Members(told.append)
    members.invite("a")
    dismiss(members, members.cursors, roll)
    assert told == ([Departure("a", why)] if why else [])
    assert members.begin() == ([] if why else ["a"])


@pytest.mark.parametrize("why", ["failed", "lane_failed", "slow", "moved", "behind", "gap"])
def test_one_that_waits_and_is_paused_is_tried_no_more_until_it_is_resumed(why: Why) -> None:
    roster = Roster(["a"])
    roster.departed(Departure("a", why, TransientError("down")), 0.0)
    reconsider(roster, PAUSED, {"a": HIGH}, 1.0)
    assert roster.due(1_000.0) == []
    standing = roster.standings(1.0)["a"]
    assert (standing.reason, standing.paused, standing.failing) == ("it is paused", True, False)
    reconsider(roster, PAUSED, {}, 2.0)
    reconsider(roster, SERVED, {}, 3.0)
    assert roster.due(3.0) == ["a"]
    assert not roster.standings(3.0)["a"].paused


def test_one_whose_last_share_goes_on_is_paused_when_that_has_ended() -> None:
    roster = Roster(["a"])
    roster.departed(Departure("a", "detached"), 0.0)
    reconsider(roster, PAUSED, {}, 1.0)
    assert roster.leaving(1.0) == {"a": 1.0}, "nobody else may serve it before"
    roster.departed(Departure("a", "slow"), 2.0)
    reconsider(roster, PAUSED, {}, 3.0)
    assert roster.standings(3.0)["a"].paused
    assert roster.due(1_000.0) == []


def test_one_that_is_taken_out_while_it_is_paused_is_said_to_be_out() -> None:
    roster = Roster(["a"])
    roster.departed(Departure("a", "paused"), 0.0)
    reconsider(roster, Roll({}, {}), {}, 1.0)
    assert roster.standings(1.0)["a"].reason == "it is not active"


def test_one_whose_pause_after_a_failure_is_long_is_tried_at_once_when_it_was_moved() -> None:
    roster = Roster(["a"])
    for _ in range(12):
        roster.departed(Departure("a", "failed"), 0.0)
    reconsider(roster, SERVED, {"a": HIGH}, 1.0)
    assert roster.due(1.0) == []
    reconsider(roster, Roll({"a": LOW}, {}), {"a": HIGH}, 1.0)
    assert roster.due(1.0) == ["a"]


def test_one_that_is_in_a_lane_is_left_there() -> None:
    roster = Roster(["a"])
    roster.put("a", SHARED)
    reconsider(roster, PAUSED, {}, 1.0)
    assert roster.in_lane(SHARED) == ["a"], "its lane says when it has left"
