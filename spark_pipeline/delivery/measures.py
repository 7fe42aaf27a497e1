"""What is measured of the deliveries to one consumer. Per range, never per row."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cdc.metrics import catalogue
from spark_pipeline.delivery.outcome import Outcome
from spark_pipeline.slices.exchange import SliceMarker


class DeliveryMeasures:
    """Those of a consumer of one source; they belong to its worker's thread."""

    def __init__(self, source: str, consumer: str) -> None:
        self._labels = source, consumer
        self._wait = catalogue.WAIT_SECONDS.of(source, consumer)
        self._delivery = catalogue.DELIVERY_SECONDS.of(source, consumer)
        self._end_to_end = catalogue.END_TO_END_SECONDS.of(source, consumer)
        self._attempts = catalogue.DELIVERY_ATTEMPTS.of(source, consumer)
        self._successes = catalogue.DELIVERY_SUCCESSES.of(source, consumer)
        self._messages = catalogue.DELIVERED_MESSAGES.of(source, consumer)
        self._bytes = catalogue.DELIVERED_BYTES.of(source, consumer)
        self._matched = catalogue.MATCHED_MESSAGES.of(source, consumer)
        self._filtered = catalogue.FILTERED_MESSAGES.of(source, consumer)

    def waited(self, seconds: float) -> None:
        """A range was in the feed for so long."""
        self._wait.observe(seconds)

    def delivered(
        self,
        outcome: Outcome,
        took_s: float,
        slices: Sequence[SliceMarker] = (),
        size: int = 0,
    ) -> int:
        """A delivery ended. Returns how many changes it settled that the consumer takes.

        ``slices`` are where they came from, ``size`` the bytes of all of these.
        """
        sent = outcome.delivered + outcome.absorbed
        queued = 0 if outcome.queued is None else int(outcome.queued.num_rows)
        matched = sent + len(outcome.dead) + queued
        if not matched and not outcome.failed:
            return 0  # there was nothing for it
        self._attempts.add()
        self._matched.add(matched)
        self._delivery.observe(took_s)
        if outcome.failed:
            assert outcome.error is not None
            self.failed(outcome.error.kind or type(outcome.error).__name__)
        else:
            self._successes.add()
        if sent:
            self._messages.add(sent)
            rows = sum(piece.rows for piece in slices)
            if rows:
                self._bytes.add(size * min(1.0, sent / rows))
                self._note_ages(slices, sent / rows)
        return matched

    def failed(self, kind: str) -> None:
        """A delivery failed."""
        catalogue.DELIVERY_FAILURES.of(*self._labels, kind).add()

    def filtered(self, rows: int) -> None:
        """So many changes were passed that the consumer does not take."""
        self._filtered.add(max(0, rows))

    def _note_ages(self, slices: Sequence[SliceMarker], share: float) -> None:
        """A slice counts as its last commit, and as many messages as its part of the delivery."""
        now_s = time.time()
        for piece in slices:
            if piece.rows:
                age_s = max(0.0, now_s - piece.commit_us / 1e6)
                self._end_to_end.observe(age_s, piece.rows * share)
