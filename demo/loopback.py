"""Ports for servers of our own on the loopback interface."""

from __future__ import annotations

import random
import socket
from typing import Final

from cdc.errors import OperatorError

LOOPBACK: Final = "127.0.0.1"

# Below every system's range for outgoing connections, so that a client's socket cannot take the
# port of a server that is being restarted.
_LOWEST: Final = 20_000
_HIGHEST: Final = 32_000
_ATTEMPTS: Final = 50


def free_port() -> int:
    """A port that is free now."""
    choose = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = choose.randint(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise OperatorError(
        f"No free port between {_LOWEST} and {_HIGHEST} was found in {_ATTEMPTS} attempts",
        fix="stop servers that are no longer needed",
    )
