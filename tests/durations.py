"""How long each test file takes, so that the longest are begun first and all workers end together.

The seconds are those of runs on two busy cores; only their ratios matter. To renew them::

    make test ARGS=--junitxml=test.xml && make test-sinks ARGS=--junitxml=sinks.xml &&
        .venv/bin/python -m tests.durations test.xml sinks.xml
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


def measured(*reports: Path) -> dict[str, float]:
    """What JUnit reports say, longest first; files that take less than a second are left out.

    Of a file that is in several the longest time counts.
    """
    longest: Counter[str] = Counter()
    for report in reports:
        seconds: Counter[str] = Counter()
        for case in ElementTree.parse(report).iter("testcase"):
            module = re.sub(r"\.Test\w+$", "", case.attrib["classname"])
            path = module.replace(".", "/") + ".py"
            seconds[path] += float(case.attrib["time"])  # type: ignore[assignment]
        longest |= seconds
    return {path: round(taken, 1) for path, taken in longest.most_common() if taken >= 1}


if __name__ == "__main__":
    found = measured(*map(Path, sys.argv[1:]))
    FILE.write_text(json.dumps(found, indent=0) + "\n")
