"""Every test of decoding runs twice: with a few rows one by one, and all by whole columns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.decoding import few


@pytest.fixture(params=["few", "columns"], autouse=True, scope="module")
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "columns":
            patch.setattr(few, "ROWS_MAX", 0)
        yield
