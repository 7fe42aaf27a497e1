"""Tables that change while a sink fails between a schema change and the row behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.state.positions import consumer_cursors
from sinks.base import Delivery
from sinks.file import FileSink
from tests import pgoutput
from tests.fix_postgres import Database
from tests.log_pipeline import LogPipeline, arrived, cursors_of
from tests.schema_version_rows import ASKS, PART, V1, V2, new, old, part
from tests.wire_messages import transaction

pytestmark = pytest.mark.migrated

PART_2 = pgoutput.relation(2, "public", "part", [("id", 23, True), ("p", 25)])


@contextmanager
def failing_after(messages: int) -> Iterator[None]:
    """Every delivery takes so many messages and fails at the next."""
    whole = FileSink.deliver

    def deliver(self: FileSink, batch: MessageBatch) -> Delivery:
        done = whole(self, batch.slice(0, messages))
        if len(batch) <= messages:
            return done
        return Delivery(done.settled, done.absorbed, TransientError("the sink is down"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSink, "deliver", deliver)
        yield


def told(pipeline: LogPipeline) -> list[tuple[str, str]]:
    found = arrived(pipeline.directory / "all")
    cursors = cursors_of(found)
    assert cursors == sorted(set(cursors))
    return [(message["action"], message["metadata"]["table_name"]) for message in found]


def test_a_sink_that_fails_behind_a_schema_change_gets_it_once(
    database: Database, tmp_path: Path
) -> None:
    with database.connect() as state:
        pipeline = LogPipeline(state, tmp_path, all=ASKS)
        pipeline.write(V1, *transaction(0x100, old(1)))
        # The commit of an open transaction is the next record: idle progress ends where it stands.
        pipeline.idle(0x200)
        pipeline.take()
        pipeline.begin_log_anew()
        pipeline.start()
        pipeline.write(V2, *transaction(0x200, new(2)))
        with failing_after(1), pytest.raises(TransientError, match="the sink is down"):
            pipeline.take()
        assert consumer_cursors(state, "shop") == {"all": Cursor(0x200, 0)}
        pipeline.start()
        pipeline.take()
        assert told(pipeline) == [("insert", "item"), ("schema_change", "item"), ("insert", "item")]
        pipeline.close()


def test_a_place_is_never_given_twice_when_the_log_is_cut_again(
    database: Database, tmp_path: Path
) -> None:
    with database.connect() as state:
        pipeline = LogPipeline(state, tmp_path, all=ASKS)
        pipeline.write(V1, PART, *transaction(0x100, old(1), part()))
        pipeline.take()
        changing = transaction(0x200, V2, new(2), PART_2, pgoutput.insert(2, ["1", "x"]))
        pipeline.write(*changing[:3])
        with failing_after(1), pytest.raises(TransientError, match="the sink is down"):
            pipeline.take()
        pipeline.begin_log_anew()
        pipeline.write(V1, PART, *changing)
        pipeline.start()
        pipeline.take()
        assert told(pipeline)[2:] == [
            ("schema_change", "item"),
            ("insert", "item"),
            ("schema_change", "part"),
            ("insert", "part"),
        ]
        pipeline.close()
