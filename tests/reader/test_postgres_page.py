"""What docs/sinks/postgres.md shows can be done as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

from cdc.config import PostgresDestination, loads
from sinks import Sink, open_sink
from tests.fix_postgres import Database
from tests.slot_batches import slot_batches
from tests.walbrook_service import _url

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sinks" / "postgres.md").read_text(encoding="utf-8")
(CONFIGURATION,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)


def sinks_of(there: Database) -> list[Sink]:
    """The sinks of the example, all with the destination of this test."""
    url = _url(there.dsn)
    given = {"SOURCE_URL": url, "WAREHOUSE_URL": url, "WAREHOUSE_PASSWORD": "p"}
    opened = []
    for sink in loads(CONFIGURATION, ROOT, given).sinks:
        destination = sink.destination
        assert isinstance(destination, PostgresDestination)
        values = destination.model_dump(exclude_unset=True)
        for key in ("hostname", "database", "username", "password", "sslmode", "sslrootcert"):
            values.pop(key, None)
        here = PostgresDestination.model_validate({**values, "url": url})
        size = sink.effective_batch_size
        opened.append(open_sink(here, source="shop", consumer=sink.name, batch_size=size))
    return opened


def test_the_example_fills_the_tables_that_the_queries_ask(
    database: Database, there: Database
) -> None:
    with slot_batches(database) as source:
        source.run(
            "CREATE TABLE orders (id int PRIMARY KEY, status text)",
            "INSERT INTO orders VALUES (7, 'new')",
            "UPDATE orders SET status = 'sent'",
        )
        batch = source.taken()
    for sink in sinks_of(there):
        delivery = sink.deliver(batch)
        sink.close()
        assert (delivery.settled, delivery.error) == (2, None)
    assert there.execute("SELECT * FROM shop.orders") == [(7, "sent")]
    history, events, positions = (there.execute(query) for query in QUERIES)
    assert [row[1:] for row in history] == [("insert", "new"), ("update", "sent")]
    assert [row[1:3] for row in events] == [("insert", "new"), ("update", "sent")]
    assert sorted(row[1:3] for row in positions) == [
        ("audit", "events"),
        ("copy", "mirror"),
        ("history", "append"),
    ]
    named = there.execute(
        "SELECT attname FROM pg_attribute WHERE attnum > 0 AND attrelid IN "
        "('history.orders'::regclass, 'walbrook_events'::regclass)"
    )
    own = {name for (name,) in named} - {"status"}
    assert {name for name in own if f"`{name}`" not in PAGE} == set()
