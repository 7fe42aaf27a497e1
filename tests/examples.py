"""How many examples a property is tried with: some by ``make test``, many more by ``make fuzz``."""

from __future__ import annotations

import os
from typing import Final

FACTOR_VARIABLE: Final = "WALBROOK_TEST_EXAMPLES_FACTOR"
_FACTOR: Final = int(os.environ.get(FACTOR_VARIABLE, "1"))


def examples(count: int) -> int:
    """Returns what ``max_examples`` is to be."""
    return count * _FACTOR
