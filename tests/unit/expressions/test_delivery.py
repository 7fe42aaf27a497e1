"""A share with verdicts: what passes goes out as its transform made it, what failed is dead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.errors import ProtocolError
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from sinks.columns import by_route
from spark_pipeline.delivery import deliver as deliver_module
from spark_pipeline.delivery.dead_letters import dead_letters
from spark_pipeline.delivery.deliver import Share, deliver
from spark_pipeline.delivery.verdicts import leave_verdicts
from spark_pipeline.expressions.evaluate import verdicts
from spark_pipeline.expressions.for_share import judge
from spark_pipeline.slices.exchange import Exchange, markers_from_arrow, pick_up
from spark_pipeline.slices.raw_rows import RawRows
from spark_pipeline.source.stream import LogStreamReader
from tests import pgoutput
from tests.unit.decoding.frames import COMMIT_LSN, OID, Frame
from tests.unit.expressions.tables import ORDERS, ORIGIN, consumer, order

FUNCTIONS = "python:tests.unit.expressions.operators_functions"
END = Cursor(COMMIT_LSN, 6)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Orders of 5, 0, 150 and 7 in two batches, a truncate between the last two."""
    frame = Frame()
    for number, amount in enumerate(("5", "0", "150")):
        frame.add(order(number, amount), ORDERS)
    frame.add(pgoutput.truncate([OID]), ORDERS)
    frame.add(order(4, "7"), ORDERS)
    frame.add(order(5, "x"), ORDERS)
    writer = LogWriter(tmp_path / "log")
    for start, end in ((0, 2), (2, 6)):
        writer.append(
            frame.batch().slice(start, end - start),
            frame.schemas,
            first=Cursor(COMMIT_LSN, start),
            high=Cursor(COMMIT_LSN, end),
        )
    writer.close()
    return tmp_path / "log"


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[Exchange]:
    made = Exchange.create(tmp_path / "exchange")
    yield made
    made.remove()


def share_of(log: Path, exchange: Exchange, sink: SinkConfig) -> Share:
    """The whole log for a consumer, judged."""
    reader = LogStreamReader.in_process(log, exchange.directory)
    view = LogView(log)
    start, end = ({"batch": at, "history": view.history()} for at in (0, view.next_batch()))
    batches = [b for part in reader.partitions(start, end) for b in reader.read(part)]
    markers = markers_from_arrow(pa.Table.from_batches(batches))
    share = Share(sink, ORIGIN, str(log), Cursor(0, 0), END, markers)
    return judge(None, share, log, None, exchange.directory)


def file_sink(directory: Path, **given: Any) -> SinkConfig:
    destination = {"type": "file", "path": str(directory)}
    return consumer(destination, actions=["insert", "truncate"], **given)


def lines(directory: Path) -> list[Any]:
    files = sorted(directory.glob("*.jsonl"))
    return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


def test_only_what_passes_goes_out(log: Path, exchange: Exchange, tmp_path: Path) -> None:
    share = share_of(log, exchange, file_sink(tmp_path / "out", filter=f"{FUNCTIONS}:large"))
    outcome = deliver(share)
    assert (outcome.cursor, outcome.delivered, outcome.error) == (END, 2, None)
    sent = lines(tmp_path / "out")
    assert [(m["action"], m["record"].get("id")) for m in sent] == [
        ("insert", 2),
        ("truncate", None),
    ]


def test_a_transform_is_the_message_and_what_it_does_not_see_keeps_its_shape(
    log: Path, exchange: Exchange, tmp_path: Path
) -> None:
    sink = file_sink(tmp_path / "out", transform=f"{FUNCTIONS}:summary")
    deliver(share_of(log, exchange, sink))
    first, second, third, truncate, fourth = lines(tmp_path / "out")
    assert [first, second, third, fourth] == [{"order": n} for n in (0, 1, 2, 4)]
    assert (truncate["action"], truncate["metadata"]["table_name"]) == ("truncate", "things")


def test_schema_changes_among_transformed_messages_keep_their_shape(
    exchange: Exchange, tmp_path: Path
) -> None:
    frame = Frame()
    for message in (order(0, "5"), b'S{"version":2}', order(1, "5")):
        frame.add(message, ORDERS)
    writer = LogWriter(tmp_path / "log")
    writer.append(frame.batch(), frame.schemas, first=Cursor(COMMIT_LSN, 0), high=END)
    writer.close()
    sink = file_sink(
        tmp_path / "out", transform=f"{FUNCTIONS}:summary", filter=f"{FUNCTIONS}:large"
    )
    sink = sink.model_copy(update={"actions": ("insert", "schema_change")})
    outcome = deliver(share_of(tmp_path / "log", exchange, sink))
    (message,) = lines(tmp_path / "out")
    assert (message["action"], message["record"]) == ("schema_change", {"version": 2})
    assert (outcome.delivered, outcome.error) == (1, None)


def test_a_change_on_which_an_expression_fails_is_dead_and_the_others_go_out(
    log: Path, exchange: Exchange, tmp_path: Path
) -> None:
    sink = file_sink(tmp_path / "out", transform=f"{FUNCTIONS}:fails_on_zero")
    share = share_of(log, exchange, sink)
    assert share.failed == 2
    outcome = deliver(share)
    assert [m for m in lines(tmp_path / "out") if isinstance(m, int)] == [5, 150, 7]
    letters = list(dead_letters(share, outcome.cursor, LogView(log)))
    assert [(letter.cursor.idx, letter.kind) for letter in letters][:1] == [(5, "decode")]
    by_cursor = {letter.cursor.idx: letter for letter in reversed(letters)}
    zero = by_cursor[1]
    assert (zero.kind, zero.action, zero.table_name) == ("expression", "insert", "things")
    assert "an amount is zero" in zero.error
    assert (zero.payload, zero.schema) == (order(1, "0"), ORDERS)
    assert by_cursor[5].kind == "decode"


def test_only_what_lies_between_the_cursors_is_dead(
    log: Path, exchange: Exchange, tmp_path: Path
) -> None:
    sink = file_sink(tmp_path / "out", transform=f"{FUNCTIONS}:fails_on_zero")
    share = share_of(log, exchange, sink)
    view = LogView(log)
    assert list(dead_letters(share, Cursor(COMMIT_LSN, 1), view)) == []
    assert [one.cursor.idx for one in dead_letters(share, Cursor(COMMIT_LSN, 2), view)] == [1]
    later = replace(share, start=Cursor(COMMIT_LSN, 2))
    assert {one.cursor.idx for one in dead_letters(later, END, view)} == {5}


def test_settled_changes_are_not_judged_again(
    log: Path, exchange: Exchange, tmp_path: Path
) -> None:
    sink = file_sink(tmp_path / "out", transform=f"{FUNCTIONS}:fails_on_zero")
    whole = share_of(log, exchange, sink)
    rest = replace(whole, start=Cursor(COMMIT_LSN, 2), verdicts=None, failed=0)
    assert judge(None, rest, log, None, exchange.directory).failed == 1


def test_a_change_without_a_verdict_does_not_go_out(
    log: Path, exchange: Exchange, tmp_path: Path
) -> None:
    sink = file_sink(tmp_path / "out", filter=f"{FUNCTIONS}:large")
    share = share_of(log, exchange, sink)
    with pytest.raises(ProtocolError, match="came without the verdicts of its expressions"):
        deliver(replace(share, verdicts=None))
    found = verdicts(None, sink, ORIGIN, _first_batch(log))
    path, failed = leave_verdicts(exchange.directory, found)
    with pytest.raises(ProtocolError, match=r"change at .*:2 came to a sink without a verdict"):
        deliver(replace(share, verdicts=path, failed=failed))
    assert lines(tmp_path / "out") == []


def _first_batch(log: Path) -> RawRows:
    (frame,) = LogView(log).frames(0, 1)
    return RawRows(frame.raw, frame.schemas)


def test_routes_go_with_their_messages(log: Path, exchange: Exchange) -> None:
    sink = consumer(routing=f"{FUNCTIONS}:by_note", actions=["insert", "truncate"])
    share = share_of(log, exchange, sink)
    (rows,) = deliver_module._batches(share, pick_up(share.slices))
    batch = deliver_module._shaped(share, rows)
    assert [(route, len(run)) for route, run in by_route(batch)] == [("n", 3), (None, 1), ("n", 1)]
    assert "message" not in batch.rows.schema.names


def test_a_consumer_without_expressions_is_not_asked_for_verdicts(
    log: Path, exchange: Exchange, tmp_path: Path
) -> None:
    assert deliver(share_of(log, exchange, file_sink(tmp_path / "out"))).delivered == 5
