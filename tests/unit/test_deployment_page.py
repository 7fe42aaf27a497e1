"""docs/deployment.md names keys that exist and shows configurations that load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.config import Config, loads
from tests.unit.config.config_texts import databases

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^( *)```yaml\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
ENVIRONMENT = {"SPARK_SECRET": "s", "SHOP_URL": "postgres://u:p@db/shop"}
# Spark's own, for conf; what has a key of its own is refused there.
OF_SPARK = {
    "spark.authenticate",
    "spark.log",
    "spark.speculation",
    "spark.worker_raised",
    "spark.printed",
}


def blocks() -> dict[str, str]:
    """The YAML on the page by its first line."""
    found = {}
    for indent, text in BLOCKS:
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        found[lines[0].removeprefix("# ")] = "\n".join(lines[1:]) + "\n"
    return found


@pytest.mark.parametrize("name", ["one machine", "encrypted", "standalone", "yarn"])
def test_every_configuration_loads(name: str) -> None:
    config = loads(databases() + blocks()[name], ROOT, ENVIRONMENT)
    assert config.serves_log is (name != "one machine")


def test_the_manifests_agree_with_the_configuration_in_them() -> None:
    documents: list[dict[str, Any]] = list(yaml.safe_load_all(blocks()["kubernetes.yaml"]))
    by_kind = {document["kind"]: document for document in documents}
    config = loads(by_kind["ConfigMap"]["data"]["walbrook.yaml"], ROOT, ENVIRONMENT)
    assert config.serves_log
    service = by_kind["Service"]
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert config.log.flight.advertised == config.spark.driver_host == name
    ports = {port["port"] for port in service["spec"]["ports"]}
    conf = config.spark.conf
    assert ports == {
        config.log.flight.port,
        config.service.http.port,
        int(conf["spark.driver.port"]),
        int(conf["spark.blockManager.port"]),
    }
    (container,) = by_kind["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert {port["containerPort"] for port in container["ports"]} == ports


def test_every_key_named_on_the_page_exists() -> None:
    named = re.findall(r"`((?:log|spark|service|state)\.[a-z_.]+)(?::[^`]*)?`", PAGE)
    assert len(named) > 20
    for key in set(named) - OF_SPARK:
        if _is_conf(key):
            continue
        section: Any = Config
        for part in key.split("."):
            assert part in section.model_fields, key
            section = section.model_fields[part].annotation


def _is_conf(key: str) -> bool:
    """A name of Spark's with more parts than any key of ours below ``spark`` has."""
    return key.startswith("spark.") and key.count(".") > 1
