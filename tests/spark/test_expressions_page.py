"""The examples of docs/expressions.md, run as they stand there on changes of a real Postgres."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from pyspark.sql import SparkSession

from cdc.config import SinkConfig
from cdc.decoding.relation import parse_relation
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.expressions.evaluate import verdicts
from spark_pipeline.slices.raw_rows import RawRows
from tests.fix_postgres import Database
from tests.unit.decoding.frames import Frame

PAGE = (Path(__file__).parents[2] / "docs" / "expressions.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLES = [(text, BLOCKS[at + 1][1]) for at, (kind, text) in enumerate(BLOCKS) if kind == "yaml"]


@pytest.fixture
def changes(database: Database) -> RawRows:
    """What the page's statements do, as the slot tells it."""
    (sql,) = [text for kind, text in BLOCKS if kind == "sql"]
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    database.execute("SELECT pg_create_logical_replication_slot('page', 'pgoutput')")
    database.execute(f"SET synchronous_commit = on; {sql}")
    sent = database.execute(
        "SELECT data FROM pg_logical_slot_get_binary_changes('page', NULL, NULL, "
        "'proto_version', '1', 'publication_names', 'pub')"
    )
    database.execute("SELECT pg_drop_replication_slot('page')")
    frame, relation = Frame(), b""
    for (message,) in sent:
        if message[:1] == b"R":
            relation = message
        elif message[:1] in b"IUD":
            frame.add(message, relation, oid=parse_relation(relation).oid)
    return RawRows(frame.batch(), frame.schemas)


def test_each_example_does_what_the_page_says(
    spark: SparkSession,
    changes: RawRows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (module,) = [text for kind, text in BLOCKS if kind == "python"]
    (tmp_path / "shop_rules.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(EXAMPLES) == 9
    for text, expected in EXAMPLES:
        given = {"name": "page", "database": "shop", "destination": {"type": "file", "path": "o"}}
        sink = SinkConfig.model_validate(given | yaml.safe_load(text))
        rows = verdicts(spark, sink, Origin("shop", "h", "d"), changes).to_pylist()
        assert [row["error"] for row in rows] == [None] * 4, text
        assert [_shown(row, sink) for row in rows] == orjson.loads(expected), text


def _shown(row: dict[str, Any], sink: SinkConfig) -> object:
    if "transform" in sink.expressions:
        return orjson.loads(row["message"]) if row["keep"] else None
    return row["route"] if "routing" in sink.expressions else row["keep"]
