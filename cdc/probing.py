"""Trying many places at once, each within a deadline: for ``walbrook config check --connect``.

Invariants: a caller waits no longer than the deadline, whatever a place does. An error of ours says
what is wrong and the fix; any other is named by its kind alone, since it may quote a secret.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cdc.error_text import public_text
from cdc.errors import TransientError, WalbrookError


@dataclass(frozen=True)
class ProbeResult:
    """What was found at one place: ``text`` says what was checked, or what is wrong."""

    name: str
    ok: bool
    text: str


def probe_all(places: Mapping[str, Callable[[], str]], deadline_s: float) -> list[ProbeResult]:
    """Try all places at once. Returns what was found at each, in their order."""
    found: dict[str, ProbeResult] = {}

    def run(name: str, look: Callable[[], str]) -> None:
        try:
            found[name] = ProbeResult(name, True, look())
        except TransientError as error:
            # A service tries again by itself; a person who tried once has to do something.
            found[name] = ProbeResult(
                name, False, str(TransientError(error.what, fix=_by_hand(error)))
            )
        except WalbrookError as error:
            found[name] = ProbeResult(name, False, str(error))
        except Exception as error:
            found[name] = ProbeResult(name, False, public_text(error))

    # A thread that hangs must not keep the process from ending.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in places.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {deadline_s:g} s. To fix it: check the address, and that it is up"
    return [found.get(name, ProbeResult(name, False, late)) for name in places]


def _by_hand(error: TransientError) -> str:
    """What a person can do, without what the service does by itself."""
    return error.fix.removeprefix("it is retried").removeprefix("; ")
