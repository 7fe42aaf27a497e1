"""A test that decodes changes runs twice: a few rows one by one, and all by whole columns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.decoding import small_batch


@pytest.fixture(params=["few", "columns"], scope="module")
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "columns":
            patch.setattr(small_batch, "ROWS_MAX", 0)
        yield
