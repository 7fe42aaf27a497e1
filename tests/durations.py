"""How long each test file takes, so that the longest are begun first and all workers end together.

The seconds are those of one run on two cores; only their ratios matter. To renew them::

    make test ARGS=--junitxml=junit.xml && .venv/bin/python -m tests.durations junit.xml
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
UNKNOWN_S = 5.0


def known() -> dict[str, float]:
    """Seconds by the path of the test file."""
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def measured(report: Path) -> dict[str, float]:
    """What a JUnit report says, longest first; files that take less than a second are left out."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        module = re.sub(r"\.Test\w+$", "", case.attrib["classname"])
        seconds[module.replace(".", "/") + ".py"] += float(case.attrib["time"])  # type: ignore[assignment]
    return {path: round(taken, 1) for path, taken in seconds.most_common() if taken >= 1}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measured(Path(sys.argv[1])), indent=0) + "\n")
