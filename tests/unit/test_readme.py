"""What the README shows is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cdc.change import CHANGE_SCHEMA
from cdc.config import loads

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_configuration_in_the_readme_is_valid() -> None:
    (text,) = re.findall(r"```yaml\n(databases:.*?)```", README, re.DOTALL)
    config = loads(text, ROOT, {"PGPASSWORD": "p", "SEARCH_TOKEN": "t"})
    assert [sink.name for sink in config.sinks] == ["orders-stream", "archive", "search"]


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z]+)|^make ([a-z]+)", README, re.MULTILINE))
    for target in {one or other for one, other in named}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "page", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_every_link_leads_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), f"{page} links to {link}"


def test_the_parquet_columns_are_all_documented() -> None:
    text = (ROOT / "docs" / "messages.md").read_text()
    for name in CHANGE_SCHEMA.names:
        assert f"`{name}`" in text, name
