"""What the log gave up on purpose: rows in SQL, and a message at the consumer's sink."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import psycopg
import pyarrow as pa
import pytest

from cdc.config import loads
from cdc.connection import Connection
from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.raw import RAW_SCHEMA
from cdc.errors import OperatorError
from cdc.log.view import LogView
from cdc.log.writer import LogWriter, Retention, SegmentLimits
from cdc.state.feeds import FeedFigures, open_feed
from cdc.state.gaps import skip_evicted, unreported_gaps
from cdc.state.migrate import migrate
from cdc.state.positions import (
    consumer_cursors,
    left_behind,
    register_source,
    restart_cursor,
)
from spark_pipeline.delivery.deliver import Origin, Share
from spark_pipeline.delivery.gaps import pass_gaps
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.stage.worker import Worker
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.settler import Settler
from tests.fix_postgres import Database
from tests.lost_changes import note_lost_changes

pytestmark = pytest.mark.migrated

KEEP_LITTLE = Retention(settled_s=0, settled_bytes=0, bytes_max=2_000, on_full="evict")
CONFIG = """
databases:
  - name: shop
    url: postgres://localhost/shop
    slot: {name: slot}
    publication: {name: pub}
sinks:
  - name: lines
    destination: {type: file, path: %s}
"""


@pytest.fixture
def state(database: Database) -> Iterator[Connection]:
    with database.connect() as connection:
        migrate(connection)
        register(connection, ["lines", "ahead"])
        connection.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/60' WHERE name = 'ahead'")
        yield connection


def register(connection: Connection, consumers: list[str]) -> int:
    return register_source(
        connection,
        name="shop",
        slot="slot",
        publication="pub",
        system_identifier="1",
        slot_lsn=0x10,
        consumers=consumers,
    )


def evicted_log(directory: Path) -> LogView:
    """A log that had batches at 10, 20, … 60 (hexadecimal) and kept the last one."""
    log = LogWriter(directory, limits=SegmentLimits(rows=1))
    fill(log)
    assert log.retain(ORIGIN, KEEP_LITTLE).evicted == 5
    log.close()
    return LogView(directory)


def fill(log: LogWriter) -> None:
    for lsn in range(0x10, 0x70, 0x10):
        row = dict.fromkeys(RAW_SCHEMA.names, 0) | {"commit_lsn": lsn, "payload": b"x" * 100}
        batch = pa.RecordBatch.from_pylist([row], schema=RAW_SCHEMA)
        log.append(batch, {}, first=Cursor(lsn, 0), high=Cursor(lsn, 1))


def shares(path: Path) -> dict[str, Share]:
    (sink,) = loads(CONFIG % path, base=path.parent).sinks
    return {"lines": Share(sink, Origin("shop", "h", "d"), str(path), ORIGIN, ORIGIN, [])}


def told(path: Path) -> list[dict[str, object]]:
    lines = [line for file in path.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [orjson.loads(line) for line in lines]


def test_a_consumer_behind_the_evicted_floor_passes_it_and_its_sink_is_reported(
    state: Connection, tmp_path: Path
) -> None:
    view = evicted_log(tmp_path / "log")
    _, evicted = view.floors()
    for _ in range(2):
        pass_gaps(state, view.floors()[1], source="shop", term=1, shares=shares(tmp_path / "lines"))
    assert consumer_cursors(state, "shop") == {"lines": evicted, "ahead": Cursor(0x60, 0)}
    assert restart_cursor(state, "shop") == evicted
    (message,) = told(tmp_path / "lines")
    assert message["action"] == "gap"
    assert message["record"] == {"from": "0/10:0", "to": str(evicted), "reason": "evicted"}
    rows = state.execute(
        "SELECT consumer, to_lsn::text, reported_at IS NOT NULL FROM walbrook.gaps"
    )
    assert rows.fetchall() == [("lines", "0/50", True)]
    assert left_behind(state, "shop", view.floors()[0]) == {}


def test_a_gap_that_was_noted_but_not_reported_is_reported_at_the_next_start(
    state: Connection, tmp_path: Path
) -> None:
    view = evicted_log(tmp_path / "log")
    skip_evicted(state, source="shop", term=1, evicted=view.floors()[1])
    assert len(unreported_gaps(state, "shop")) == 1
    pass_gaps(state, view.floors()[1], source="shop", term=1, shares=shares(tmp_path / "lines"))
    assert unreported_gaps(state, "shop") == []
    assert len(told(tmp_path / "lines")) == 1


def test_a_gap_that_grows_is_reported_again(state: Connection, tmp_path: Path) -> None:
    for end in (Cursor(0x20, 1), Cursor(0x30, 1)):
        state.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/10', cursor_idx = 0")
        pass_gaps(state, end, source="shop", term=1, shares=shares(tmp_path / "lines"))
        assert consumer_cursors(state, "shop")["lines"] == end
    ends = [message["record"] for message in told(tmp_path / "lines")]
    assert [end["to"] for end in ends if isinstance(end, dict)] == ["0/20:1", "0/30:1"]


def test_a_gap_whose_sink_fails_stays_unreported(state: Connection, tmp_path: Path) -> None:
    view = evicted_log(tmp_path / "log")
    (tmp_path / "lines").write_text("a file where the sink wants a folder")
    unreported = pass_gaps(
        state, view.floors()[1], source="shop", term=1, shares=shares(tmp_path / "lines")
    )
    assert "cannot be told of its gap from 0/10:0" in str(unreported["lines"])
    assert len(unreported_gaps(state, "shop")) == 1


def test_an_earlier_start_of_the_service_moves_no_consumer(
    state: Connection, tmp_path: Path
) -> None:
    view = evicted_log(tmp_path / "log")
    register(state, ["lines", "ahead"])
    with pytest.raises(OperatorError, match="taken over"):
        pass_gaps(state, view.floors()[1], source="shop", term=1, shares={})
    assert consumer_cursors(state, "shop")["lines"] == Cursor(0x10, 0)


def test_a_consumer_below_what_was_trimmed_is_refused(state: Connection) -> None:
    lost = left_behind(state, "shop", Cursor(0x20, 0))
    assert "lines of source shop stands at cursor 0/10:0" in str(lost["lines"])


def test_an_operator_can_accept_what_a_lost_slot_took(state: Connection, tmp_path: Path) -> None:
    note_lost_changes(state, "shop", end="0/900")
    rows = state.execute(
        "SELECT consumer, from_lsn::text, to_lsn::text, reason "
        "FROM walbrook.accept_gap('shop', '0/50')"
    ).fetchall()
    assert rows == [("lines", "0/10", "0/50", "accepted")]
    assert restart_cursor(state, "shop") == Cursor(0x50, 0)
    assert consumer_cursors(state, "shop") == {"lines": Cursor(0x50, 0), "ahead": Cursor(0x60, 0)}
    pass_gaps(state, ORIGIN, source="shop", term=1, shares=shares(tmp_path / "lines"))
    assert [message["action"] for message in told(tmp_path / "lines")] == ["gap"]


@pytest.mark.parametrize(
    ("call", "says"),
    [("'nobody', '0/50'", "there is no source nobody"), ("'shop', '0/5'", "already stands at")],
)
def test_accepting_what_is_no_gap_is_refused(state: Connection, call: str, says: str) -> None:
    note_lost_changes(state, "shop", end="0/900")
    with pytest.raises(psycopg.errors.RaiseException, match=says):
        state.execute(f"SELECT walbrook.accept_gap({call})".encode())


def test_an_eviction_while_a_worker_begins_is_a_gap_too(
    state: Connection, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path / "log", limits=SegmentLimits(rows=1))
    fill(log)

    def slow_telling(*arguments: object, **named: object) -> object:
        unreported = pass_gaps(*arguments, **named)  # type: ignore[arg-type]
        log.retain(ORIGIN, KEEP_LITTLE)
        return unreported

    monkeypatch.setattr("spark_pipeline.stage.worker.pass_gaps", slow_telling)
    register(state, ["lines"])
    lines = shares(tmp_path / "lines")["lines"]
    settings = StageSettings(
        source="shop",
        term=2,
        origin=lines.origin,
        consumers=[lines.consumer],
        state_dsn=database.dsn,
        log_directory=tmp_path / "log",
        checkpoint_directory=tmp_path,
        micro_batch_rows=1000,
        micro_batch_bytes=1 << 20,
    )
    connections = ConnectionPool(database.dsn, name="test")
    run = open_feed(state, "shop", 2, ["lines"]).run
    settler = Settler("shop", 2, run, database.dsn, connections, lambda: FeedFigures(ORIGIN))
    context = WorkerContext(settings, Feed(1 << 20), settler, connections, tmp_path)
    worker = Worker(lines.consumer, context)
    assert worker.begin()
    assert worker.batch == 5
    assert [message["action"] for message in told(tmp_path / "lines")] == ["gap"]
    assert consumer_cursors(state, "shop") == {"lines": log.manifest.evicted}
    worker.close()
    connections.close()
    log.close()
