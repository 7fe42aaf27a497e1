"""A log and its tier beside it; the tier as a directory and as a URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.log.tier import Tier


@pytest.fixture(params=["directory", "url"])
def tier(tmp_path: Path, request: pytest.FixtureRequest) -> Tier:
    cold = tmp_path / "cold"
    return Tier(str(cold) if request.param == "directory" else f"file://{cold}", hot_bytes=3_000)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "shop"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold" / "shop"
