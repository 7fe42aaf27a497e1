"""A reader over TLS: what the server has sent is taken at once, however its records are cut."""

from __future__ import annotations

import random
from contextlib import closing

from cdc.replication.stream import ReplicationStream
from cdc.stop import StopSignal
from tests.fix_postgres import Database
from tests.waiting import until

_SEED = 20
# What follows flushes it, and sends nothing itself.
_EMIT = """
SELECT pg_logical_emit_message(false, 'p', repeat('x', size))
  FROM unnest(%s::int[]) WITH ORDINALITY AS s (size, n) ORDER BY n
"""
_FLUSH = "INSERT INTO unpublished VALUES (1)"


def test_the_last_message_of_a_burst_over_tls_does_not_wait_for_the_next(
    tls_database: Database,
) -> None:
    """The rest of a record that is larger than libpq's free room must not stay in OpenSSL.

    Nothing follows a message outside a transaction, so its end is the end of what is sent.
    """
    print(f"seed {_SEED}")
    chance = random.Random(_SEED)
    slot, stop = f"slot_{tls_database.name}", StopSignal()
    tls_database.execute("CREATE TABLE unpublished (id int)")
    tls_database.execute("CREATE PUBLICATION pub")
    tls_database.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    found: list[bytes] = []
    expected = 0

    with (
        closing(
            ReplicationStream(tls_database.dsn, slot=slot, publication="pub", start_lsn=0)
        ) as stream,
        tls_database.connect() as writer,
    ):

        def taken() -> bool:
            while stream.drain(found, bytes_max=1 << 24, rows_max=1 << 30) != (0, None):
                pass
            if len(found) < expected:
                stream.wait(0.05, stop.descriptor)
            return len(found) >= expected

        writer.execute("SET synchronous_commit = on")
        for _ in range(30):
            sizes = [chance.randrange(10, 40_000) for _ in range(chance.randrange(12))]
            sizes.append(chance.randrange(8_000, 70_000))
            expected += len(sizes)
            writer.execute(_EMIT, [sizes])
            writer.execute(_FLUSH)
            until("the burst", taken, timeout_s=5)
            stream.confirm(received_lsn=1, confirmed_lsn=1, reply_requested=False)
