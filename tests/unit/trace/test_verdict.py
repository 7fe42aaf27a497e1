"""The verdict on a change: each combination of what is known gives no more than is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cdc.cursor import Cursor
from cdc.state.traces import KnownStep
from cdc.trace.records import Delivery, Refusal, RetryClaim, Timing
from cdc.trace.verdict import Evidence, Filtering, Verdict, judge

AT = Cursor(0x18, 2)
REFUSAL = Refusal(AT, 1, "poison", "it answered 422")


def step(name: str, **detail: object) -> KnownStep:
    return KnownStep("hook", name, None, name, detail)


SETTLED = step("cursor", settled=True)
BEFORE = step("cursor", settled=False)


def sent(at_us: int = 10, *, settled_us: int = 11, **given: object) -> Delivery:
    start, end = Cursor(0x10, 0), Cursor(0x20, 0)
    values: dict[str, object] = {"rows": 5, "delivered": 2, "settled_us": settled_us}
    timing = Timing(ended_us=at_us)
    return Delivery("hook", start, end, end, timing, **{**values, **given})  # type: ignore[arg-type]


def refused(at_us: int = 10, **given: object) -> Delivery:
    return sent(at_us, **{"queued": 1, "refusals": (REFUSAL,), **given})  # type: ignore[arg-type]


def retried(at_us: int, *, well: bool) -> RetryClaim:
    return RetryClaim("hook", at_us, (AT,) if well else (), () if well else (REFUSAL,))


def evidence(
    known: Sequence[KnownStep],
    deliveries: Sequence[Delivery] = (),
    retries: Sequence[RetryClaim] = (),
) -> Evidence:
    return Evidence(AT, known, None, Filtering.NONE, deliveries, retries, is_pull=False)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (evidence([SETTLED], [sent()]), Verdict.DELIVERED),
        (evidence([SETTLED], [sent(settled_us=0)]), Verdict.DELIVERED),
        (evidence([SETTLED]), Verdict.SETTLED),
        (evidence([SETTLED], [sent(delivered=0)]), Verdict.SETTLED),
        (evidence([BEFORE]), Verdict.NOT_YET),
        (evidence([BEFORE], [sent()]), Verdict.COMES_AGAIN),
        (evidence([BEFORE], [refused()]), Verdict.NOT_YET),
        (evidence([SETTLED, step("waits")], [refused()]), Verdict.WAITS),
        (evidence([SETTLED, step("dead")], [refused()]), Verdict.DEAD),
        (evidence([SETTLED, step("stored")], [sent()]), Verdict.STORED),
        (evidence([SETTLED], [refused()]), Verdict.DISCARDED),
        (evidence([SETTLED], [refused()], [retried(20, well=True)]), Verdict.DELIVERED),
        (evidence([SETTLED], [refused()], [retried(20, well=False)]), Verdict.DISCARDED),
        # The process was killed before the refusal was settled, and the next one delivered it.
        (evidence([SETTLED], [refused(settled_us=0), sent(20)]), Verdict.DELIVERED),
        # It was refused and discarded, and came again with a rewind.
        (evidence([SETTLED], [refused(), sent(20)]), Verdict.DELIVERED),
        (evidence([SETTLED, step("gap")]), Verdict.GIVEN_UP),
        (evidence([SETTLED, step("gap")], [sent()]), Verdict.DELIVERED),
        (evidence([SETTLED, step("gap")], [sent(queued=1)]), Verdict.GIVEN_UP),
        (evidence([SETTLED, step("begun")]), Verdict.BEGAN_LATER),
    ],
)
def test_the_verdict_follows_from_rows_cursor_and_records(
    found: Evidence, verdict: Verdict
) -> None:
    assert judge(found) is verdict


@pytest.mark.parametrize(
    ("filtering", "delivered", "verdict"),
    [
        (Filtering.PASSES, 2, Verdict.DELIVERED),
        (Filtering.KEEPS_BACK, 2, Verdict.FILTERED),
        (Filtering.NOT_EVALUATED, 2, Verdict.DELIVERED_OR_LEFT_OUT),
        (Filtering.UNKNOWN, 2, Verdict.DELIVERED_OR_LEFT_OUT),
        (Filtering.FAILED, 2, Verdict.DELIVERED_OR_LEFT_OUT),
        # Of the stretch nothing went out, so this change did not.
        (Filtering.NOT_EVALUATED, 0, Verdict.FILTERED),
    ],
)
def test_a_filter_that_was_not_evaluated_leaves_open_what_only_it_knows(
    filtering: Filtering, delivered: int, verdict: Verdict
) -> None:
    found = evidence([SETTLED], [sent(delivered=delivered)])
    assert judge(replace(found, filtering=filtering)) is verdict


def test_a_change_that_comes_again_is_not_said_to_be_delivered_while_its_filter_is_unknown() -> (
    None
):
    found = replace(evidence([BEFORE], [sent()]), filtering=Filtering.NOT_EVALUATED)
    assert judge(found) is Verdict.NOT_YET


def test_a_change_that_the_sink_does_not_take_is_left_out_wherever_its_cursor_stands() -> None:
    for known in (SETTLED, BEFORE):
        found = replace(evidence([known], [sent()]), left_out_by="actions: delete is not among")
        assert judge(found) is Verdict.LEFT_OUT


def test_a_message_of_a_pull_consumer_that_is_gone_was_acknowledged() -> None:
    found = replace(evidence([SETTLED], [sent()]), is_pull=True)
    assert judge(found) is Verdict.ACKNOWLEDGED
