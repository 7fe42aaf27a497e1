"""The programs on docs/spark.md, with their places in folders of a test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_PAGE: Final = Path(__file__).parents[1] / "docs" / "spark.md"


def program(heading: str, log: Path, lake: Path) -> str:
    """The first program below a heading, reading ``log`` and writing below ``lake``."""
    page = _PAGE.read_text(encoding="utf-8")
    _, section = re.split(rf"^##+ {heading}\n", page, maxsplit=1, flags=re.MULTILINE)
    text: str = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    return text.replace("/var/lib/walbrook/log/shop", str(log)).replace('"/lake/', f'"{lake}/')
