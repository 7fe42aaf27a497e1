"""How much a benchmark does."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What the command line may change; a benchmark may have other defaults. All are above zero."""

    rows: int = 1_000_000
    transaction_rows: int = 10_000
    rounds: int = 3
    rate: int = 1_000
    seconds: int = 20
    outage: int = 120


def progress(text: str) -> None:
    """Tell the person who waits; standard output is for results."""
    print(text, file=sys.stderr, flush=True)
