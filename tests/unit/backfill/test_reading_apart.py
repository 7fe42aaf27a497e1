"""Reading a chunk in a process of another purpose."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from cdc.backfill.query import RowChoice
from cdc.backfill.ranges import BlockRange
from cdc.backfill.reading import ChunkRead, ChunkTask, read_chunk_apart
from cdc.backfill.snapshot import Snapshot
from cdc.config.table import TableName

_TABLE = TableName("public", "item")


def _priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell threads apart")
def test_a_chunk_is_read_at_a_lower_priority_than_what_the_process_does_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = ChunkRead(Snapshot(1, 2), 3, 4, 5)
    priorities: list[int] = []

    def read(_task: ChunkTask) -> ChunkRead:
        priorities.append(_priority())
        return found

    monkeypatch.setattr("cdc.backfill.reading.read_chunk", read)
    task = ChunkTask(
        "", "shop", "pub", _TABLE, _TABLE, 1, 1, RowChoice(BlockRange(0, None)), Path("chunk")
    )
    before = _priority()
    assert read_chunk_apart(task) == found
    assert priorities == [min(19, before + 5)]
    assert _priority() == before
