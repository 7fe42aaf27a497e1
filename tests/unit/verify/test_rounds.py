"""When a row counts as different while changes flow."""

from __future__ import annotations

import random

from cdc.verify.held import Key
from cdc.verify.records import HeldRow, same_cells
from cdc.verify.rounds import ROUNDS_MAX, Difference, Rounds, SourceRow

KEY: Key = ("1",)


def _round(
    rounds: Rounds, before: SourceRow | None, held: bytes | None, after: SourceRow | None
) -> None:
    was = {} if before is None else {KEY: before}
    there = {} if held is None else {KEY: HeldRow(held)}
    now = {} if after is None else {KEY: after}
    left = rounds.undecided([KEY], was, there, same_cells)
    rounds.decide(left, was, there, now, same_cells)


def test_a_row_that_differs_in_the_same_way_in_two_rounds_is_different() -> None:
    row = SourceRow(b"new", "7")
    for held, wanted in ((b"old", Difference.DIFFERENT), (None, Difference.MISSING)):
        rounds = Rounds.of([KEY])
        _round(rounds, row, held, row)
        assert (rounds.open, rounds.differing) == ({KEY}, {})
        _round(rounds, row, held, row)
        assert (rounds.open, rounds.differing) == (set(), {KEY: wanted})


def test_a_row_that_only_the_destination_has_is_extra() -> None:
    rounds = Rounds.of([KEY])
    for _ in range(2):
        _round(rounds, None, b"old", None)
    assert rounds.differing == {KEY: Difference.EXTRA}


def test_a_row_that_the_destination_held_before_or_after_a_change_is_equal() -> None:
    for held in (b"a", b"b"):
        rounds = Rounds.of([KEY])
        _round(rounds, SourceRow(b"a", "1"), held, SourceRow(b"b", "2"))
        assert (rounds.open, rounds.differing) == (set(), {})


def test_a_row_that_was_changed_and_changed_back_is_not_different() -> None:
    rounds = Rounds.of([KEY])
    for version in range(0, 2 * ROUNDS_MAX, 2):
        _round(rounds, SourceRow(b"a", str(version)), b"b", SourceRow(b"a", str(version + 1)))
    assert (rounds.open, rounds.differing) == ({KEY}, {})


def test_a_change_between_two_rounds_begins_the_count_again() -> None:
    rounds = Rounds.of([KEY])
    _round(rounds, SourceRow(b"a", "1"), b"x", SourceRow(b"a", "1"))
    _round(rounds, SourceRow(b"a", "1"), b"x", SourceRow(b"b", "2"))
    _round(rounds, SourceRow(b"b", "2"), b"x", SourceRow(b"b", "2"))
    assert (rounds.open, rounds.differing) == ({KEY}, {})


def test_a_destination_that_only_lags_is_never_called_different() -> None:
    """Any history of a row; the destination has all that was committed before ``before``."""
    for seed in range(2_000):
        chance = random.Random(seed)
        history: list[SourceRow | None] = [SourceRow(b"0", "0")]
        for version in range(1, chance.randrange(2, 40)):
            content = str(chance.randrange(3)).encode()
            # A row is deleted and comes back with other content, as no round can see it otherwise.
            history.append(SourceRow(content + b"%d" % version, str(version)))
            if chance.random() < 0.2:
                history.append(None)
        rounds, at = Rounds.of([KEY]), 0
        for _ in range(ROUNDS_MAX):
            before = at
            held = chance.randrange(before, min(len(history), before + 3))
            after = chance.randrange(held, min(len(history), held + 3))
            there = history[held]
            if history[before] is not None or history[after] is not None:
                _round(rounds, history[before], there.content if there else None, history[after])
            at = after
        assert rounds.differing == {}, f"seed {seed}"
