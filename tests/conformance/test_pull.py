"""What only a pull consumer's sink must do."""

from __future__ import annotations

import pytest

from cdc.cursor import Cursor
from cdc.errors import TransientError
from cdc.queue.groups import BY_KEY
from sinks.pull import PullSink, Queue
from tests.conformance.messages import CONSUMER, batch
from tests.fix_postgres import Database
from tests.pull_queue import SOURCE, make_pull_consumer

pytestmark = pytest.mark.migrated


def test_nothing_is_stored_for_a_consumer_whose_cursor_was_moved_meanwhile(
    database: Database,
) -> None:
    make_pull_consumer(database, CONSUMER)
    database.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/8', cursor_idx = 0")
    messages = batch(0, 10)
    sink = PullSink(Queue(database.dsn, SOURCE, BY_KEY), consumer=CONSUMER)
    sink.settled_at(Cursor(16, 3))
    refused = sink.deliver(messages)
    assert isinstance(refused.error, TransientError)
    assert "was moved" in refused.error.what
    assert database.execute("SELECT count(*) FROM walbrook.pull_messages") == [(0,)]
    assert sink.settled_at(Cursor(8, 0)).deliver(messages).settled == 10
    assert database.execute("SELECT count(*) FROM walbrook.pull_messages") == [(10,)]
    sink.close()
