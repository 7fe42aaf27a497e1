"""Rates and lags of the last looks, as lines of blocks."""

from __future__ import annotations

from cdc.service.cli.sparklines import LOOKS_MAX, RateHistory, sparkline


def look(
    delivered: int, lag_s: float, *, active: bool = True
) -> tuple[list[dict[str, object]], ...]:
    named: dict[str, object] = {"source": "shop", "consumer": "search"}
    return (
        [{**named, "delivered": delivered, "active": active}],
        [{**named, "lag_seconds": lag_s}],
    )


def test_a_block_is_as_high_as_its_share_of_the_largest() -> None:
    assert sparkline([0, 3.5, 7]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


def test_the_rate_is_what_came_between_two_looks() -> None:
    history = RateHistory()
    history.note(10.0, *look(100, 0.0))
    history.note(12.0, *look(300, 4.0))
    (row,) = history.rows()
    assert list(row.cells) == ["shop/search", "100", "█", "4.0", "▁█"]


def test_a_rewind_counts_as_no_rate_and_a_sink_that_is_gone_as_nothing() -> None:
    history = RateHistory()
    history.note(1.0, *look(100, 0.0))
    history.note(2.0, *look(50, 0.0))
    assert history.rows()[0].cells[1] == "0"
    history.note(3.0, *look(50, 0.0, active=False))
    assert history.rows() == []


def test_only_the_last_looks_are_kept() -> None:
    history = RateHistory()
    for number in range(LOOKS_MAX + 10):
        history.note(float(number), *look(number, 0.0))
    assert len(history.rows()[0].cells[2]) == LOOKS_MAX
