"""What is counted of deliveries, and what the system says of processes."""

from __future__ import annotations

import os
import time

import pytest

from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.metrics import catalogue
from cdc.service.http.process_metrics import process_metrics
from spark_pipeline.delivery.measures import DeliveryMeasures
from spark_pipeline.delivery.outcome import Outcome, Poison
from spark_pipeline.slices.exchange import SliceMarker

END = Cursor(80, 0)


def piece(rows: int, age_s: float) -> SliceMarker:
    return SliceMarker(0, 1, 0, 0, 1, rows, END, int((time.time() - age_s) * 1e6), "", 0, 0)


def values(consumer: str) -> dict[str, float]:
    """The counts of a consumer; failures by kind."""
    return {
        " ".join([family.name, *labels[2:]]): cell.value
        for family in catalogue.ALL
        for labels, cell in family.cells.items()
        if labels[:2] == ("unit", consumer) and hasattr(cell, "value") and cell.value
    }


def test_a_delivery_counts_what_it_settled_and_how_old_its_slices_are() -> None:
    measures = DeliveryMeasures("unit", "sound")
    outcome = Outcome("sound", END, delivered=30, absorbed=10, dead=(Poison(END, "bad"),))
    matched = measures.delivered(outcome, 0.2, [piece(60, 3), piece(20, 40), piece(0, 0)], 8_000)
    measures.filtered(80 - matched)
    assert values("sound") == {
        "delivery_attempts": 1,
        "delivery_successes": 1,
        "delivered_messages": 40,
        "delivered_bytes": 4_000,
        "matched_messages": 41,
        "filtered_messages": 39,
    }
    ages = catalogue.END_TO_END_SECONDS.of("unit", "sound")
    by_bound = dict(zip(catalogue.END_TO_END_SECONDS.bounds, ages.counts, strict=False))
    assert {bound: count for bound, count in by_bound.items() if count} == {5.0: 30, 60.0: 10}
    assert ages.total == pytest.approx(3 * 30 + 40 * 10, rel=0.1)


def test_a_failure_is_counted_by_its_kind_and_what_it_settled_before_counts_too() -> None:
    measures = DeliveryMeasures("unit", "failing")
    for error in (TransientError("it is down", kind="answered"), TransientError("it hangs")):
        measures.delivered(Outcome("failing", END, delivered=5, error=error), 0.1)
    assert values("failing") == {
        "delivery_attempts": 2,
        "delivery_failures answered": 1,
        "delivery_failures TransientError": 1,
        "delivered_messages": 10,
        "matched_messages": 10,
    }


def test_a_range_with_nothing_for_the_consumer_is_no_attempt() -> None:
    measures = DeliveryMeasures("unit", "idle")
    assert measures.delivered(Outcome("idle", END), 0.1, [piece(10, 0)], 100) == 0
    measures.filtered(10)
    assert values("idle") == {"filtered_messages": 10}


def test_a_process_has_its_cpu_and_memory_and_one_that_is_gone_has_none() -> None:
    cpu, memory = process_metrics({"here": os.getpid(), "gone": 2**22 - 1})
    of_here = {"here"} | {f"here {part}" for part in ("jvm", "workers")}
    for family, least in ((cpu, 0.0), (memory, 1 << 20)):
        shown = {sample.labels["process"]: sample.value for sample in family.samples}
        assert shown.keys() <= of_here
        assert shown["here"] > least
