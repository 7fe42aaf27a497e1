"""How many rows a micro-batch may take: bounds and convergence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.source.batch_size import ROWS_MIN, Admission

TARGET_S = 0.5


def pass_one(admission: Admission, number: int, took_s: float, *, limited: bool = True) -> None:
    admission.handed_out(number, 100.0, limited=limited)
    admission.asked(number, 100.0 + took_s)


@given(
    rows_max=st.integers(1, 10_000_000),
    steps=st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=40),
)
def test_the_limit_stays_within_its_bounds_and_steps_at_most_by_two(
    rows_max: int, steps: list[tuple[float, bool]]
) -> None:
    admission = Admission(rows_max, TARGET_S)
    for number, (took_s, limited) in enumerate(steps):
        before = admission.rows
        pass_one(admission, number, took_s, limited=limited)
        assert min(ROWS_MIN, rows_max) <= admission.rows <= rows_max
        assert before / 2 - 1 <= admission.rows <= before * 2
        if took_s > TARGET_S:
            assert admission.rows <= before
        elif not limited:
            assert admission.rows == before


@given(
    us_per_row=st.floats(0.01, 10_000),
    fixed_s=st.floats(0, 0.2),
    rows_max=st.integers(ROWS_MIN, 1_000_000),
)
def test_with_a_constant_cost_a_row_micro_batches_come_to_take_the_time_wanted(
    us_per_row: float, fixed_s: float, rows_max: int
) -> None:
    admission = Admission(rows_max, TARGET_S)
    for number in range(60):
        pass_one(admission, number, fixed_s + admission.rows * us_per_row / 1e6)
    wanted = (TARGET_S - fixed_s) / us_per_row * 1e6
    wanted = max(ROWS_MIN, min(rows_max, wanted))
    assert abs(admission.rows - wanted) <= 0.02 * wanted + 2


def test_the_batch_size_begins_below_its_ceiling_and_only_if_it_adapts() -> None:
    assert Admission(200_000, TARGET_S).rows == 50_000
    assert Admission(2_000, TARGET_S).rows == ROWS_MIN
    assert Admission(10, TARGET_S).rows == 10
    off = Admission(200_000, 0)
    pass_one(off, 1, 60)
    assert off.rows == 200_000


def test_only_the_question_for_what_follows_a_range_says_how_long_it_took() -> None:
    admission = Admission(200_000, TARGET_S)
    admission.handed_out(5, 100.0, limited=True)
    admission.asked(9, 200.0)
    assert admission.rows == 50_000
    admission.handed_out(10, 300.0, limited=True)
    admission.asked(10, 310.0)
    assert admission.rows == 25_000
    admission.asked(10, 400.0)
    assert admission.rows == 25_000


def test_under_pressure_micro_batches_may_take_longer_but_never_have_more_than_the_most() -> None:
    admission = Admission(200_000, TARGET_S)
    admission.handed_out(1, 100.0, limited=True)
    admission.asked(1, 100.0 + TARGET_S * 2, widened_by=4.0)
    assert admission.rows == 100_000
    for number in range(2, 6):
        admission.handed_out(number, 100.0, limited=True)
        admission.asked(number, 100.0, widened_by=4.0)
    assert admission.rows == 200_000
    pass_one(admission, 9, TARGET_S * 2)
    assert admission.rows == 100_000
