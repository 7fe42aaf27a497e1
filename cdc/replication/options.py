"""What is asked of pgoutput at START_REPLICATION, by the server's version. No I/O.

Invariants: nothing is asked that the server does not have; what was configured and is
not there is an error, never left out silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cdc.errors import SourceError

Origin = Literal["any", "none"]

_OLDEST: Final = 14  # the first with ``messages`` and with streaming
_TWO_PHASE: Final = 15
_ORIGIN: Final = 16


@dataclass(frozen=True)
class StreamOptions:
    """What the configuration wants of a replication stream.

    ``stream_transactions``: large transactions are sent before they commit. ``two_phase``: prepared
    transactions are sent at PREPARE; the server notes it at the slot, which from then on does so
    whether asked or not. ``origin``: ``none`` leaves out what other replication wrote.
    """

    stream_transactions: bool = False
    two_phase: bool = False
    origin: Origin = "any"


def plugin_options(server_version: int, wanted: StreamOptions) -> tuple[tuple[str, str], ...]:
    """Names and values for pgoutput; ``server_version`` is a number such as 180001."""
    major = server_version // 10_000
    _require(major, _OLDEST, "is too old for Walbrook", "upgrade the server")
    options = [("proto_version", "1"), ("messages", "true")]
    if wanted.stream_transactions:
        options[0] = ("proto_version", "2")
        options.append(("streaming", "on"))
    if wanted.two_phase:
        _require(
            major,
            _TWO_PHASE,
            "cannot send prepared transactions",
            "set slot.two_phase of this database to false, or upgrade the server",
        )
        options[0] = ("proto_version", "3")
        options.append(("two_phase", "on"))
    if wanted.origin == "none":
        _require(
            major,
            _ORIGIN,
            "cannot leave out what came by replication",
            "set origin of this database to any, or upgrade the server",
        )
        options.append(("origin", "none"))
    return tuple(options)


def _require(major: int, least: int, lacks: str, fix: str) -> None:
    if major < least:
        raise SourceError(
            f"Postgres {major} {lacks}: that needs {least} or later",
            fix=fix,
            kind="server_too_old",
        )
