"""Destinations that lost what they had been sent, as health events.

A destination that keeps a position says with each delivery how far it had come before. If that is
less than it was once sent, it was emptied, deleted or restored from an older copy. Delivery goes on
behind that; ``walbrook.consumers.lost_at`` stays until an operator has seen it.
"""

from __future__ import annotations

from cdc.connection import Connection
from cdc.state.health import Condition, report_conditions

# Consumers whose destination lost something, and those that have an open event about it.
_LOST = """
SELECT c.name, c.destination, c.lost_at::timestamptz(0)::text
  FROM walbrook.consumers c
 WHERE c.source = %(source)s AND (
       c.active AND c.lost_at IS NOT NULL
       OR EXISTS (SELECT FROM walbrook.health h
                   WHERE h.source = c.source AND h.consumer = c.name
                     AND h.kind = 'destination_lost_data'))
 ORDER BY 1
"""


def report_lost_destinations(connection: Connection, source: str, term: int) -> None:
    """Open, renew or resolve each consumer's event about what its destination lost."""
    for consumer, destination, lost_at in connection.execute(_LOST, {"source": source}).fetchall():
        conditions = [] if lost_at is None else [_lost(str(consumer), destination, lost_at)]
        report_conditions(
            connection, source, term, conditions, consumer=str(consumer), scope="destination_"
        )


def _lost(consumer: str, destination: object, lost_at: object) -> Condition:
    # A sink that follows rewinds takes everything again; for others the event says what becomes of
    # the rest.
    way = ")" if destination == "postgres" else ", destination => 'new_generation')"
    return Condition(
        "destination_lost_data",
        "warning",
        f"the {destination} destination of {consumer} lacked messages at {lost_at} that had been "
        "delivered to it: it was emptied, deleted or restored from an older copy. Delivery went on "
        "with what follows, so whoever had not read them there never will",
        fix=f"to deliver again what the change log still holds, call walbrook.rewind('{consumer}', "
        f"to_earliest => true{way}; to do without, call "
        f"walbrook.accept_loss('{consumer}')",
    )
