"""The messages of a release, made piece by piece."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import combinations

import numpy as np
import pyarrow as pa

from cdc.decoding.format import ValueFormat
from cdc.eventtime.released import Released
from cdc.state.event_numbers import Numbering
from spark_pipeline.delivery.merged_shape import SOURCE
from spark_pipeline.eventtime.release import OwnRows, Release, watermark_row
from tests.unit.decoding.changes_of_every_kind import changes_of_every_kind

HOUR_US = 3_600_000_000


def released(places: list[int], source: int) -> Released:
    """These of the changes of every kind, in this order."""
    at = np.array(places, np.intp)
    times = at * HOUR_US
    codes, sources = np.zeros(len(at), np.int32), np.full(len(at), source, np.int16)
    return Released([changes_of_every_kind()], at, times, times, codes, sources)


def test_a_message_is_the_same_in_whatever_piece_it_is_made() -> None:
    told = [OwnRows(watermark_row(HOUR_US, datetime(2026, 11, 18, tzinfo=UTC)))]
    numbering = Numbering(71299203, 41)
    release = Release(released([2, 0], 1), released([3, 1, 4], 0), told, numbering, ValueFormat())
    assert len(release) == 6
    whole = release.piece(0, 6)
    assert whole["late"].to_pylist() == ["true", "true", None, None, None, None]
    assert whole[SOURCE].to_pylist() == release.sources.tolist() == [1, 1, 0, 0, 0, 0]
    places = zip(whole["commit_lsn"].to_pylist(), whole["commit_idx"].to_pylist(), strict=True)
    assert [*places] == [numbering.place(at) for at in range(6)]
    changes = changes_of_every_kind()
    for name, known in (("origin_lsn", "commit_lsn"), ("origin_idx", "commit_idx")):
        assert (
            whole[name].to_pylist()[:5]
            == changes[known].take(pa.array([2, 0, 3, 1, 4])).to_pylist()
        )
        assert whole[name][5] == whole[known][5], "what is our own stands nowhere else"
    for start, stop in combinations(range(7), 2):
        assert release.piece(start, stop) == whole.slice(start, stop - start)
