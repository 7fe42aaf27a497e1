"""A range that a consumer which is behind has decoded by executors, without the rest of a stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc.log.open import open_log
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.feed.decoded_range import DecodedRange
from spark_pipeline.feed.planner import Planner
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.slices.exchange import PlannedRange
from tests import pgoutput
from tests.wire_messages import transaction
from tests.written_log import write

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
BATCHES, ROWS = 8, 500


@pytest.fixture
def settings(tmp_path: Path) -> StageSettings:
    """Of a log of some batches."""
    batches = [
        [
            *([ITEM] if number == 1 else []),
            *transaction(
                number * 0x100,
                *(pgoutput.insert(1, [str(number * ROWS + i), "n"]) for i in range(ROWS)),
            ),
        ]
        for number in range(1, BATCHES + 1)
    ]
    write(tmp_path / "log", *batches)
    return StageSettings(
        source="shop", term=1, origin=Origin("shop", "h", "d"), consumers=[], state_dsn="",
        log_directory=tmp_path / "log", checkpoint_directory=tmp_path, micro_batch_rows=10_000,
        micro_batch_bytes=16 << 20,
    )  # fmt: skip


def decode(settings: StageSettings, spark: SparkSession, scratch: Path) -> DecodedRange:
    log = open_log(settings.log_directory)
    history, end = log.history(), log.next_batch()
    log.close()
    planner = Planner(settings, history, scratch, spark=spark, job_group="a job")
    plan = planner.as_job(PlannedRange(0, end, BATCHES * ROWS))
    return DecodedRange.decode(history, 0, end, plan)


def damage_last_batch(directory: Path) -> None:
    segment = sorted(directory.glob("*.seg"))[-1]
    content = bytearray(segment.read_bytes())
    content[-100] ^= 0xFF
    segment.write_bytes(content)


def test_decoded_rows_are_removed_with_the_range(
    settings: StageSettings, spark: SparkSession, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    decoded = decode(settings, spark, scratch)
    assert decoded.rows == BATCHES * ROWS
    assert [*scratch.rglob("*.arrow")]
    decoded.close()
    assert not [*scratch.iterdir()]


def test_a_job_that_fails_leaves_nothing_of_what_its_other_tasks_decoded(
    settings: StageSettings, spark: SparkSession, tmp_path: Path
) -> None:
    """A worker tries it again and again, and the files lie in shared memory."""
    damage_last_batch(settings.log_directory)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(Exception, match="CorruptionError"):
        decode(settings, spark, scratch)
    assert not [*scratch.iterdir()]
