"""A rewound consumer whose destination keeps a position: exactly once, wherever a process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pyarrow.dataset
import pytest
import redis

from cdc import failpoints
from cdc.connection import Connection
from cdc.state.lost_destinations import report_lost_destinations
from sinks.base import Sink
from sinks.file import FileSink
from sinks.parquet import ParquetSink
from sinks.redis_stream import RedisStreamSink
from tests.conformance.crash import Killed
from tests.conformance.harness import RedisHarness
from tests.conformance.messages import CONSUMER, batch, expected, numbered
from tests.log_pipeline import SOURCE, LogPipeline, arrived
from tests.queue_pipeline import insert

pytestmark = pytest.mark.migrated

WAYS = ("new_generation", "truncate")
KINDS = (
    "file",
    pytest.param("parquet", marks=pytest.mark.sinks),
    pytest.param("redis_stream", marks=pytest.mark.sinks),
)
POINTS = ("rewound", "truncating", "truncated", "delivered", "settled")


class Rewound:
    """A pipeline with one consumer, and what its destination holds, by generation."""

    def __init__(self, pipeline: LogPipeline, ids: Callable[[str], list[int]]) -> None:
        self.pipeline, self._ids = pipeline, ids

    def deliver(self, *numbers: int) -> None:
        for number in numbers:
            self.pipeline.write(*insert(number, (number, f"row {number}")))
            self.pipeline.take()

    def rewind(self, to: str, way: str) -> None:
        # The reader tells how far the log goes.
        end = str(self.pipeline.log.end).split(":")
        self.pipeline.state.execute("UPDATE walbrook.sources SET log_lsn = %s, log_idx = %s", end)
        self.pipeline.state.execute(
            "SELECT walbrook.rewind('out', %s, destination => %s)", (to, way)
        )

    def ids(self, generation: int = 1) -> list[int]:
        return self._ids("" if generation == 1 else f".generation-{generation}")


@pytest.fixture(params=KINDS)
def rewound(request: pytest.FixtureRequest, state: Connection, tmp_path: Path) -> Iterator[Rewound]:
    kind = request.param
    ids: Callable[[str], list[int]]
    if kind == "redis_stream":
        client: redis.Redis = request.getfixturevalue("redis_client")
        sink = {"type": kind, "url": request.getfixturevalue("redis_url")}

        def ids(suffix: str) -> list[int]:
            found: Any = client.xrange(f"walbrook.out{suffix}")
            return [orjson.loads(fields[b"record"])["id"] for _, fields in found]
    elif kind == "parquet":
        sink = {"type": kind, "columns": "json", "max_delay_ms": 0, "path": tmp_path / "out"}

        def ids(suffix: str) -> list[int]:
            root = tmp_path / f"out{suffix}"
            rows = pyarrow.dataset.dataset(root, format="parquet", partitioning="hive").to_table()
            by_cursor = sorted(rows.to_pylist(), key=lambda row: row["commit_lsn"])
            return [orjson.loads(row["record"])["id"] for row in by_cursor]
    else:
        sink = {"type": kind, "path": tmp_path / "out"}

        def ids(suffix: str) -> list[int]:
            return [each["record"]["id"] for each in arrived(tmp_path / f"out{suffix}")]

    pipeline = LogPipeline(state, tmp_path, out={"destination": sink})
    yield Rewound(pipeline, ids)
    pipeline.close()


def _cursor(number: int) -> str:
    """The cursor of the row that ``insert`` makes with this number."""
    return f"0/{number * 0x100:X}:0"


@contextmanager
def death_at(step: str) -> Iterator[None]:
    """The process dies at a step; nothing runs after it."""

    def die(*_: object) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "_step", step)
        patch.setattr(failpoints, "_left", 1)
        patch.setattr(os, "kill", die)
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_point_of_a_rewind_delivers_everything_exactly_once(
    rewound: Rewound, way: str, point: str
) -> None:
    pipeline = rewound.pipeline
    rewound.deliver(1, 2, 3, 4)
    assert rewound.ids() == [1, 2, 3, 4]
    rewound.rewind(_cursor(2), way)
    if point in failpoints.STEPS:
        with suppress(Killed), death_at(point):
            pipeline.start_pipeline_again()
            pipeline.take()
    elif point == "delivered":
        pipeline.start_pipeline_again()
        pipeline.serve(pipeline.log.next_batch)  # and nothing is settled
    pipeline.start()
    pipeline.take()
    rewound.deliver(5)
    assert rewound.ids(2 if way == "new_generation" else 1) == [2, 3, 4, 5]
    if way == "new_generation":
        assert rewound.ids(1) == [1, 2, 3, 4], "the old generation stays as it was"
    report_lost_destinations(pipeline.state, SOURCE, pipeline.settings.term)
    assert pipeline.rows("SELECT kind FROM walbrook.health") == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", [_cursor(2), "where it stands"])
def test_a_worker_that_is_rewound_while_it_serves_begins_again_in_the_right_place(
    rewound: Rewound, way: str, to: str
) -> None:
    pipeline = rewound.pipeline
    rewound.deliver(1, 2, 3)
    ((stands,),) = pipeline.rows("SELECT cursor_lsn || ':' || cursor_idx FROM walbrook.consumers")
    rewound.rewind(stands if to == "where it stands" else to, way)
    pipeline.write(*insert(4, (4, "row 4")))
    pipeline.take()  # the worker does not know: its settlement is refused
    pipeline.begin_again()
    pipeline.serve(pipeline.log.next_batch)
    pipeline.settler.write()
    expected = [4] if to == "where it stands" else [2, 3, 4]
    assert rewound.ids(2 if way == "new_generation" else 1) == expected
    ((cursor,),) = pipeline.rows("SELECT cursor_lsn::text FROM walbrook.consumers")
    assert cursor == "0/401"


_DELIVERS = """
import sys
from pathlib import Path
from cdc.generation import Generation
from sinks.file import FileSink
from sinks.parquet import ParquetSink
from sinks.redis_stream import RedisStreamSink
from tests.conformance.messages import CONSUMER, batch
kind, place = sys.argv[1:]
common = {"consumer": CONSUMER, "generation": Generation(1, 1)}
if kind == "file":
    sink = FileSink(Path(place), rotate_bytes=1 << 20, **common)
elif kind == "parquet":
    sink = ParquetSink(Path(place), **common)
else:
    sink = RedisStreamSink(url=place, stream_key="killed", batch_size=10, timeout_s=5, **common)
delivery = sink.deliver(batch(20, 60))
assert delivery.error is None, delivery.error
print(delivery.settled, delivery.absorbed)
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["truncating", "truncated"])
def test_a_process_that_is_killed_while_it_truncates_leaves_what_the_next_one_finishes(
    request: pytest.FixtureRequest, kind: str, step: str, tmp_path: Path
) -> None:
    place, held = str(tmp_path / "out"), None
    first: Sink
    if kind == "redis_stream":
        place, client = (
            request.getfixturevalue("redis_url"),
            request.getfixturevalue("redis_client"),
        )
        held = RedisHarness(place, client)
        held.key = "killed"
        first = RedisStreamSink(
            consumer=CONSUMER, stream_key="killed", batch_size=10, timeout_s=5, url=place
        )
    elif kind == "file":
        first = FileSink(Path(place), consumer=CONSUMER, rotate_bytes=1 << 20)
    else:
        first = ParquetSink(Path(place), consumer=CONSUMER)
    assert first.deliver(batch(0, 50)).settled == 50
    first.close()

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _DELIVERS, kind, place],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip

    assert run(**{failpoints.VARIABLE: step}).returncode == -signal.SIGKILL
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["40", "0"]
    if held is not None:
        assert held.held() == expected(numbered(20, 60), start=20)
    elif kind == "file":
        lines = [m["record"]["id"] for m in arrived(Path(place))]
        assert lines == list(range(20, 60))
    else:
        rows = pyarrow.dataset.dataset(place, format="parquet", partitioning="hive").to_table()
        found = sorted(orjson.loads(text)["id"] for text in rows.column("record").to_pylist())
        assert found == list(range(20, 60))
