"""What a pipeline asks of decode for its consumers, and what each of them then sees."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from cdc.change import CHANGE_SCHEMA
from cdc.config import SinkConfig
from cdc.cursor import Cursor
from cdc.decoding.format import PLAIN, ValueFormat, Wanted
from cdc.log.writer import LogWriter
from spark_pipeline.delivery import deliver as deliver_module
from spark_pipeline.delivery.deliver import Origin, Share, deliver
from spark_pipeline.delivery.value_formats import (
    holds_tables,
    view_of,
    wanted_by,
    wanted_of_reads,
)
from spark_pipeline.feed.plan import DriverPlan
from spark_pipeline.slices.exchange import PlannedRange, SliceMarker, leave
from spark_pipeline.source import WalbrookDataSource
from spark_pipeline.source.options import driver_options
from spark_pipeline.source.range_reader import RangeReader
from tests.unit.decoding.changes_of_every_kind import changes_of_every_kind
from tests.unit.log.batches import append

MICROSECONDS = ValueFormat("unix_microsecond")


def consumer(name: str = "a", **settings: object) -> SinkConfig:
    plain: dict[str, Any] = {"destination": {"type": "file", "path": "out"}}
    return SinkConfig.model_validate({"name": name, "database": "shop", **plain, **settings})


def in_two_forms() -> tuple[Wanted, pa.RecordBatch]:
    """Changes as decode leaves them for two forms: the second one's values say so."""
    wanted = Wanted((ValueFormat(), MICROSECONDS), before=True)
    changes = changes_of_every_kind()
    for name in wanted.columns:
        other = pa.array(
            [None if text is None else '{"form":1}' for text in changes[name].to_pylist()],
            pa.string(),
        )
        changes = changes.append_column(f"{name}~1", other)
    return wanted, changes.select(wanted.schema.names)


def test_without_consumers_decode_writes_the_default_form() -> None:
    assert wanted_by([]) == PLAIN


def test_each_form_is_wanted_once_in_the_order_of_the_consumers() -> None:
    wanted = wanted_by(
        [
            consumer("a", timestamp_format="unix_microsecond"),
            consumer("b"),
            consumer("c", timestamp_format="unix_microsecond"),
            consumer("d", timestamp_format="postgres", number_format="string"),
        ]
    )
    assert wanted == Wanted((MICROSECONDS, ValueFormat(), ValueFormat("postgres", "string")))


@pytest.mark.parametrize(("shape", "before"), [("sequin", False), ("debezium", True)])
def test_old_rows_are_wanted_if_one_consumer_shows_them(shape: str, before: bool) -> None:
    assert wanted_by([consumer("a"), consumer("b", shape=shape)]).before is before


def test_a_consumer_sees_its_own_form_under_the_plain_names() -> None:
    wanted, changes = in_two_forms()
    default = view_of(changes, wanted, consumer())
    other = view_of(changes, wanted, consumer(timestamp_format="unix_microsecond"))
    assert default.schema == other.schema == CHANGE_SCHEMA
    assert default["record"].equals(changes["record"])
    assert set(other["record"].to_pylist()) == {'{"form":1}'}


def test_only_who_shows_old_rows_is_handed_them() -> None:
    wanted, changes = in_two_forms()
    assert "before" in view_of(changes, wanted, consumer(shape="debezium")).schema.names
    assert "before" not in view_of(changes, wanted, consumer(shape="record")).schema.names


def test_the_exchange_carries_every_form_to_the_consumer_that_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver_module, "_open_sinks", {})
    wanted, changes = in_two_forms()
    path = str(leave(tmp_path, iter([changes]), wanted.schema))
    high = Cursor(1 << 60, 0)
    marker = SliceMarker(0, 1, 0, 0, 1, changes.num_rows, high, 9, path, 0, 0)

    def delivered(**settings: object) -> list[Any]:
        directory = tmp_path / str(settings["name"])
        sink = consumer(**settings, destination={"type": "file", "path": directory})  # type: ignore[arg-type]
        origin = Origin("shop", "h", "app")
        share = Share(sink, origin, "run", Cursor(1, 0), high, [marker], wanted)
        outcome = deliver(pickle.loads(pickle.dumps(share)))
        assert (outcome.error, outcome.delivered) == (None, 9)
        (file,) = directory.glob("*.jsonl")
        return [orjson.loads(line) for line in file.read_bytes().splitlines()]

    assert delivered(name="plain")[1]["record"] == {"id": 7, "note": "new"}
    bare = delivered(name="micro", timestamp_format="unix_microsecond", shape="record")
    assert bare == [{"form": 1}] * 9
    assert delivered(name="envelope", shape="debezium")[2]["before"] == {"id": 7, "note": "new"}


def test_the_source_shows_the_default_form_unless_it_is_asked_otherwise() -> None:
    own = WalbrookDataSource({"path": "p"})
    assert own.schema().names == CHANGE_SCHEMA.names
    wanted = Wanted((ValueFormat(), MICROSECONDS), before=True)
    asked = WalbrookDataSource({"path": "p", "wanted": wanted.to_text()})
    assert asked.schema().names == wanted.schema.names


def test_the_reader_of_a_pipeline_asks_for_what_is_wanted_and_leaves_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, decoded = in_two_forms()

    def decode(
        raw: pa.RecordBatch, _: object, *, annotations: object, wanted: Wanted
    ) -> pa.RecordBatch:
        assert wanted == asked
        return decoded.slice(0, raw.num_rows)

    monkeypatch.setattr("spark_pipeline.source.range_reader.decode_carefully", decode)
    log = LogWriter(tmp_path / "log")
    append(log, 10, count=3)
    log.close()
    options = driver_options(tmp_path / "log", asked)
    with closing(RangeReader(options)) as reader:
        plan = DriverPlan(reader, PlannedRange(0, 1, 3), log.manifest.history)
        (found,) = plan.changes(plan.decode())
    assert found.equals(decoded.slice(0, 3))


@pytest.mark.parametrize(
    ("destination", "more", "holds", "formats"),
    [
        ({"type": "postgres", "url": "postgresql://h/d"}, {}, True, 0),
        ({"type": "postgres", "url": "postgresql://h/d"}, {"max_message_bytes": 1000}, False, 1),
        ({"type": "postgres", "url": "postgresql://h/d", "mode": "events"}, {}, False, 1),
        ({"type": "parquet", "columns": "json", "path": "out"}, {}, True, 1),
        ({"type": "file", "path": "out"}, {}, False, 1),
    ],
)
def test_sinks_that_hold_tables_get_no_messages_and_no_json_they_do_not_write(
    destination: dict[str, object], more: dict[str, Any], holds: bool, formats: int
) -> None:
    one = consumer(destination=destination, **more)
    assert holds_tables(one) == holds
    assert len(wanted_of_reads(one).formats) == formats


def test_a_view_of_rows_without_json_has_every_column() -> None:
    wanted = Wanted((), texts=True)
    rows = pa.RecordBatch.from_pylist([], wanted.schema)
    to = consumer(destination={"type": "postgres", "url": "postgresql://h/d"})
    assert view_of(rows, wanted, to).schema.names == wanted.schema.names
