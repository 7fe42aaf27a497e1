"""What waits in the queues of push consumers, as health events."""

from __future__ import annotations

from cdc.connection import Connection
from cdc.state.health import Condition, report_conditions

# Consumers for which something waits, and those that have an open event about it.
_QUEUES = """
SELECT coalesce(q.consumer, h.consumer), coalesce(q.waiting, 0), q.refused, q.first_refused
  FROM (SELECT * FROM walbrook.queues WHERE source = %(source)s) q
  FULL JOIN (SELECT consumer FROM walbrook.health
              WHERE source = %(source)s AND kind = 'queue_waiting') h USING (consumer)
 ORDER BY 1
"""


def report_queues(connection: Connection, source: str, term: int) -> None:
    """Open, renew or resolve each consumer's event about what waits for it."""
    for consumer, waiting, refused, first in connection.execute(
        _QUEUES, {"source": source}
    ).fetchall():
        conditions = []
        if waiting and refused:  # without a refusal they are on their way
            count = int(str(refused))
            behind = int(str(waiting)) - count
            messages = f"{count} message{'' if count == 1 else 's'}"
            conditions = [
                Condition(
                    "queue_waiting",
                    "warning",
                    f"the destination of {consumer} refused {messages}, and {behind} wait "
                    f"behind {'it' if count == 1 else 'them'}; the others go on. The first: "
                    f"{first}",
                    fix="they are tried again by themselves, and become dead letters after the "
                    "sink's max_deliveries; walbrook.events lists them with their errors, "
                    "walbrook.discard gives one up",
                )
            ]
        report_conditions(
            connection, source, term, conditions, consumer=str(consumer), scope="queue_"
        )
