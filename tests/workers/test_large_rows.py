"""What one large row takes in the driver, however many sinks get it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cdc.connection import Connection
from tests import pgoutput
from tests.log_pipeline import LogPipeline, arrived
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
SINKS = 5
SIZE = 64 << 20


class Peak:
    """The most memory that this process had while it was watched."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.before = self.bytes = self._process.memory_info().rss
        self._end = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self.bytes = max(self.bytes, self._process.memory_info().rss)


def test_a_large_row_takes_a_few_times_its_size_for_all_sinks_together(
    state: Connection, tmp_path: Path
) -> None:
    pipeline = LogPipeline(state, tmp_path, **{f"sink_{n}": {} for n in range(SINKS)})
    pipeline.write(ITEM, *transaction(0x100, pgoutput.insert(1, ["1", "small"])))
    pipeline.take()
    text = "0123456789abcdef" * (SIZE // 16)
    pipeline.write(*transaction(0x200, pgoutput.insert(1, ["2", text])))
    peak = Peak()
    with peak.watching():
        pipeline.take()
    for n in range(SINKS):
        assert [len(m["record"]["name"]) for m in arrived(tmp_path / f"sink_{n}")] == [5, SIZE]
    times = (peak.bytes - peak.before) / SIZE
    assert times < 6, f"{times:.1f} times its size"  # each by itself takes 2.5 times
    pipeline.close()
