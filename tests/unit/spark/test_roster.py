"""Where consumers are put, how long they wait, and that they are in one place at a time."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import TransientError
from cdc.state.lanes import SHARED
from cdc.state.pressure import DEFERRED
from spark_pipeline.members import Departure, Members, Why
from spark_pipeline.overdue import overdue
from spark_pipeline.roster import Roster, grouped

_WHYS: list[Why] = [
    "caught_up", "failed", "slow", "moved", "gap", "paused", "inactive", "behind", "lane_failed",
    "detached", "deferred",
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(_WHYS)), max_size=20))
def test_a_consumer_has_one_place_and_never_waits_longer_than_the_bound(
    steps: list[tuple[str, Why]],
) -> None:
    roster = Roster(["a", "b"])
    leaving: set[str] = set()
    now = 100.0
    for consumer, why in steps:
        now += 1
        roster.departed(Departure(consumer, why), now)
        leaving = (leaving | {consumer}) if why == "detached" else leaving - {consumer}
        for name, standing in roster.standings(now).items():
            places = [
                standing.lane is not None,
                standing.retry_s is not None,
                name in roster.parked(),
                name in leaving,
            ]
            assert sum(places) == 1 or standing.reason is None
            longest_s = 60.0 if standing.reason == DEFERRED else 30.0
            assert standing.retry_s is None or standing.retry_s <= longest_s
    assert not set(roster.due(now + 61)) & (leaving | set(roster.in_lane(SHARED)))


def test_failures_in_a_row_wait_longer_and_are_forgiven_after_a_minute() -> None:
    roster = Roster(["a"])
    waits = []
    for _ in range(12):
        roster.departed(Departure("a", "failed", TransientError("down")), 0.0)
        waits.append(roster.standings(0.0)["a"].retry_s or 0.0)
    assert waits[0] <= 0.2
    assert waits[-1] >= 15.0
    assert roster.standings(0.0)["a"].reason == "its sink failed: down"
    roster.departed(Departure("a", "failed"), 61.0)
    assert (roster.standings(61.0)["a"].retry_s or 0.0) <= 0.2


def test_a_sink_that_recovered_begins_with_the_shortest_backoff() -> None:
    roster = Roster(["a"])
    for at in range(12):
        roster.departed(Departure("a", "failed", TransientError("down")), float(at))
    roster.departed(Departure("a", "caught_up"), 13.0)
    roster.departed(Departure("a", "failed", TransientError("down")), 14.0)
    assert (roster.standings(14.0)["a"].retry_s or 0.0) <= 0.2


def test_every_waiting_consumer_but_a_deferred_one_is_due_after_a_recovery() -> None:
    roster = Roster(["failed", "lane_failed", "deferred", "paused"])
    for name in ("failed", "lane_failed", "deferred", "paused"):
        for _ in range(12):
            roster.departed(Departure(name, name), 0.0)
    assert roster.due(0.0) == []
    roster.hurry_all(0.0)
    assert roster.due(0.0) == ["failed", "lane_failed"]


def test_one_that_is_deferred_has_its_turn_after_a_minute_or_when_it_is_let() -> None:
    roster = Roster(["a", "b", "c"])
    for name in "abc":
        roster.departed(Departure(name, "deferred"), 100.0)
    roster.departed(Departure("c", "failed"), 100.0)
    assert roster.deferred() == ["a", "b"]
    assert roster.due(159.0) == ["c"]
    roster.hurry("b", 110.0)
    assert roster.due(110.0) == ["c", "b"]
    assert roster.due(160.0) == ["c", "b", "a"]
    roster.put("b", "catch_up_1")
    assert roster.deferred() == ["a"]
    assert roster.standings(160.0)["b"].reason == "deferred: pressure"


def test_one_that_is_slow_again_and_again_stays_by_itself_for_longer() -> None:
    roster = Roster(["a"])
    for _ in range(3):
        roster.departed(Departure("a", "slow"), 1000.0)
    assert roster.rejoin_after(["a"]) == 1040.0
    assert roster.due(1000.0) == ["a"]


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 5))
def test_those_that_wait_share_a_lane_only_with_those_near_to_them(
    places: list[int], lanes: int
) -> None:
    at = {f"c{number}": place for number, place in enumerate(places)}
    groups = grouped(list(at), lanes, lambda one, other: abs(at[one] - at[other]) <= 5)
    named = [name for group in groups for name in group]
    assert len(groups) <= lanes
    assert len(named) == len(set(named))
    assert not at or groups[0][0] == "c0", "the first in line is served first"
    assert all(abs(at[group[0]] - at[name]) <= 5 for group in groups for name in group)
    if len(groups) < lanes:
        assert set(named) == set(at)


def test_the_longest_due_comes_first() -> None:
    roster = Roster(["a", "b", "c"])
    for name, due_at in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        roster.wait(name, "behind", due_at)
    assert roster.due(2.5) == ["b", "c"]


def test_one_that_is_slow_for_weeks_does_no_harm() -> None:
    roster = Roster(["a"])
    for turn in range(3_000):
        roster.departed(Departure("a", "slow"), 600.0 * turn)
    assert roster.rejoin_after(["a"]) <= 600.0 * 3_000


def test_a_share_that_goes_on_after_its_consumer_left_is_known_by_its_age() -> None:
    roster = Roster(["a"])
    roster.departed(Departure("a", "detached"), 10.0)
    assert roster.leaving(70.0) == {"a": 60.0}
    (condition,) = overdue({}, roster.leaving(70.0), deadline_s=60.0, now=70.0)
    assert (condition.kind, condition.severity) == ("lane_detached_a", "warning")
    roster.departed(Departure("a", "slow"), 80.0)
    assert roster.leaving(90.0) == {}


def test_who_is_asked_to_go_in_a_micro_batch_goes_when_it_has_ended() -> None:
    told: list[Departure] = []
    members = Members(told.append)
    members.admit({"a": (1, 0), "b": (1, 0)})  # type: ignore[dict-item]
    members.begin()
    members.let_go("a", "moved")
    assert told == []
    members.end()
    assert told == [Departure("a", "moved")]
    members.let_go("b", "inactive")
    members.let_go("b", "inactive")
    assert told[1:] == [Departure("b", "inactive")]
    assert members.cursors == {}


def test_one_whose_last_share_ended_before_it_was_detached_is_told_of_once() -> None:
    told: list[Departure] = []
    members = Members(told.append)
    members.admit({"a": (1, 0)})  # type: ignore[dict-item]
    members.leave([Departure("a", "slow")])
    members.detach("a")
    assert told == [Departure("a", "slow")]


def test_an_invitation_is_for_the_next_micro_batch() -> None:
    members = Members(lambda _departure: None)
    members.begin()
    members.invite("a")
    members.end()
    assert members.begin() == ["a"]
    assert members.begin() == []


def test_a_lane_that_is_no_more_lets_nobody_go() -> None:
    told: list[Departure] = []
    members = Members(told.append)
    members.admit({"a": (1, 0)})  # type: ignore[dict-item]
    members.close()
    members.let_go("a", "moved")
    assert told == []


def test_what_is_told_of_a_consumer_is_told_in_the_order_in_which_it_happened() -> None:
    for _ in range(50):
        told: list[str] = []
        members = Members(lambda departure, told=told: told.append(departure.why))  # type: ignore[misc]
        members.admit({"a": (1, 0)})  # type: ignore[dict-item]
        ends = threading.Thread(target=members.leave, args=([Departure("a", "slow")],))
        ends.start()
        members.detach("a")
        ends.join()
        assert told in (["slow"], ["detached", "slow"])
