"""Where a routing may send a message: a stream key, a path below the sink's URL, a topic. Pure.

Invariant: a route never leaves its destination. A path has no scheme, no host, no
query and no ``..``, so a message cannot be sent to another server than the operator named.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import SinkConfig
from cdc.config.destination import KafkaDestination, WebhookDestination

ROUTE_CHARACTERS_MAX: Final = 255

_PATH: Final = r"^/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}|/)*$"
_TOPIC: Final = r"^[a-zA-Z0-9._-]{1,249}$"
_CLIMBS: Final = r"(?i)(^|/)(\.|%2e){1,2}(/|$)|//|%2f|%5c|%00"


def bad_routes(consumer: SinkConfig, routes: pa.StringArray) -> pa.StringArray:
    """Of each route what is wrong with it; null for those that can be followed."""
    nothing = pa.scalar(None, pa.string())
    length = pc.utf8_length(routes)
    wrong = pc.if_else(
        pc.or_(pc.equal(length, 0), pc.greater(length, ROUTE_CHARACTERS_MAX)),
        f"routing gave a text that is empty or has more than {ROUTE_CHARACTERS_MAX} characters",
        nothing,
    )
    if isinstance(consumer.destination, KafkaDestination):
        is_topic = pc.match_substring_regex(routes, _TOPIC)
        no_topic = "routing gave no topic: at most 249 letters, digits, ., _ and -"
        return pc.coalesce(wrong, pc.if_else(is_topic, nothing, no_topic))
    if not isinstance(consumer.destination, WebhookDestination):
        return wrong
    fits = pc.and_not(
        pc.match_substring_regex(routes, _PATH), pc.match_substring_regex(routes, _CLIMBS)
    )
    no_path = pc.if_else(
        fits, nothing, "routing gave no path: it must begin with / and hold no .., // or ?"
    )
    return pc.coalesce(wrong, no_path)
