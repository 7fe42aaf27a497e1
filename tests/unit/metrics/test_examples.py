"""The dashboard, the rules and the alerts name metrics that there are, and runbooks too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.metrics.catalogue import ALL
from tests.unit.test_prose import anchors

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
RULES, ALERTS = (EXAMPLES / "prometheus" / f"{name}.yaml" for name in ("rules", "alerts"))
DASHBOARD = EXAMPLES / "grafana" / "walbrook.json"
PAGE = ROOT / "docs" / "operations.md"


def rules(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return rules(ALERTS)


def expressions() -> Iterator[str]:
    for path in (RULES, ALERTS):
        yield from (rule["expr"] for rule in rules(path))
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_what_a_rule_records_is_all_that_the_examples_name_beside_metrics() -> None:
    recorded = {rule["record"] for rule in rules(RULES)}
    named = {name for text in expressions() for name in re.findall(r"\bwalbrook:[\w:]+", text)}
    assert named <= recorded


def test_the_documentation_has_each_metric_that_processes_measure() -> None:
    page = PAGE.read_text()
    missing = [family.name for family in ALL if f"walbrook_{family.name}" not in page]
    assert not missing


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_has_a_severity_a_summary_and_a_runbook_that_exists(
    alert: dict[str, Any],
) -> None:
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["summary"]
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == PAGE
    assert anchor in anchors(PAGE) or anchor == "{{ $labels.kind }}"
