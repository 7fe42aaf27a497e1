"""A log and its tier beside it; the tier as a directory and as a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.log.tier.tier import TierSettings


@pytest.fixture(params=["directory", "url"])
def tier(tmp_path: Path, request: pytest.FixtureRequest) -> TierSettings:
    cold = tmp_path / "cold"
    return TierSettings(
        str(cold) if request.param == "directory" else f"file://{cold}", hot_bytes=3_000
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "shop"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold" / "shop"
