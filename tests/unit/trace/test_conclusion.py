"""The conclusion on a change: each combination of what is known gives no more than is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cdc.cursor import Cursor
from cdc.state.traces import KnownStep
from cdc.trace.conclusion import Conclusion, Evidence, Filtering, conclude
from cdc.trace.records import DeliveryRecord, DeliveryTiming, Refusal, RetryClaim

AT = Cursor(0x18, 2)
REFUSAL = Refusal(AT, 1, "poison", "it answered 422")


def step(name: str, **detail: object) -> KnownStep:
    return KnownStep("hook", name, None, name, detail)


SETTLED = step("cursor", settled=True)
BEFORE = step("cursor", settled=False)


def sent(at_us: int = 10, *, settled_us: int = 11, **given: object) -> DeliveryRecord:
    start, end = Cursor(0x10, 0), Cursor(0x20, 0)
    values: dict[str, object] = {"rows": 5, "delivered": 2, "settled_us": settled_us}
    timing = DeliveryTiming(ended_us=at_us)
    return DeliveryRecord("hook", start, end, end, timing, **{**values, **given})  # type: ignore[arg-type]


def refused(at_us: int = 10, **given: object) -> DeliveryRecord:
    return sent(at_us, **{"queued": 1, "refusals": (REFUSAL,), **given})  # type: ignore[arg-type]


def retried(at_us: int, *, well: bool) -> RetryClaim:
    return RetryClaim("hook", at_us, (AT,) if well else (), () if well else (REFUSAL,))


def evidence(
    known: Sequence[KnownStep],
    deliveries: Sequence[DeliveryRecord] = (),
    retries: Sequence[RetryClaim] = (),
) -> Evidence:
    return Evidence(AT, known, None, Filtering.NONE, deliveries, retries, is_pull=False)


@pytest.mark.parametrize(
    ("found", "conclusion"),
    [
        (evidence([SETTLED], [sent()]), Conclusion.DELIVERED),
        (evidence([SETTLED], [sent(settled_us=0)]), Conclusion.DELIVERED),
        (evidence([SETTLED]), Conclusion.SETTLED),
        (evidence([SETTLED], [sent(delivered=0)]), Conclusion.SETTLED),
        (evidence([BEFORE]), Conclusion.NOT_YET),
        (evidence([BEFORE], [sent()]), Conclusion.COMES_AGAIN),
        (evidence([BEFORE], [refused()]), Conclusion.NOT_YET),
        (evidence([SETTLED, step("waits")], [refused()]), Conclusion.WAITS),
        (evidence([SETTLED, step("dead")], [refused()]), Conclusion.DEAD),
        (evidence([SETTLED, step("stored")], [sent()]), Conclusion.STORED),
        (evidence([SETTLED], [refused()]), Conclusion.DISCARDED),
        (evidence([SETTLED], [refused()], [retried(20, well=True)]), Conclusion.DELIVERED),
        (evidence([SETTLED], [refused()], [retried(20, well=False)]), Conclusion.DISCARDED),
        # The process was killed before the refusal was settled, and the next one delivered it.
        (evidence([SETTLED], [refused(settled_us=0), sent(20)]), Conclusion.DELIVERED),
        # It was refused and discarded, and came again with a rewind.
        (evidence([SETTLED], [refused(), sent(20)]), Conclusion.DELIVERED),
        (evidence([SETTLED, step("gap")]), Conclusion.GIVEN_UP),
        (evidence([SETTLED, step("gap")], [sent()]), Conclusion.DELIVERED),
        (evidence([SETTLED, step("gap")], [sent(queued=1)]), Conclusion.GIVEN_UP),
        (evidence([SETTLED, step("begun")]), Conclusion.BEGAN_LATER),
    ],
)
def test_the_conclusion_follows_from_rows_cursor_and_records(
    found: Evidence, conclusion: Conclusion
) -> None:
    assert conclude(found) is conclusion


@pytest.mark.parametrize(
    ("filtering", "delivered", "conclusion"),
    [
        (Filtering.PASSES, 2, Conclusion.DELIVERED),
        (Filtering.KEEPS_BACK, 2, Conclusion.FILTERED),
        (Filtering.NOT_EVALUATED, 2, Conclusion.DELIVERED_OR_LEFT_OUT),
        (Filtering.UNKNOWN, 2, Conclusion.DELIVERED_OR_LEFT_OUT),
        (Filtering.FAILED, 2, Conclusion.DELIVERED_OR_LEFT_OUT),
        # Of the stretch nothing went out, so this change did not.
        (Filtering.NOT_EVALUATED, 0, Conclusion.FILTERED),
    ],
)
def test_a_filter_that_was_not_evaluated_leaves_open_what_only_it_knows(
    filtering: Filtering, delivered: int, conclusion: Conclusion
) -> None:
    found = evidence([SETTLED], [sent(delivered=delivered)])
    assert conclude(replace(found, filtering=filtering)) is conclusion


def test_a_change_that_comes_again_is_not_said_to_be_delivered_while_its_filter_is_unknown() -> (
    None
):
    found = replace(evidence([BEFORE], [sent()]), filtering=Filtering.NOT_EVALUATED)
    assert conclude(found) is Conclusion.NOT_YET


def test_a_change_that_the_sink_does_not_take_is_left_out_wherever_its_cursor_stands() -> None:
    for known in (SETTLED, BEFORE):
        found = replace(evidence([known], [sent()]), left_out_by="actions: delete is not among")
        assert conclude(found) is Conclusion.LEFT_OUT


def test_a_message_of_a_pull_consumer_that_is_gone_was_acknowledged() -> None:
    found = replace(evidence([SETTLED], [sent()]), is_pull=True)
    assert conclude(found) is Conclusion.ACKNOWLEDGED
