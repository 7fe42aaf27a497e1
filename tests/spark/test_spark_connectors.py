"""The programs on docs/spark.md that need connectors of Spark, which there are for 4.2 alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.spark_jars import delta_jars, row_level_tables
from tests.spark_page import program
from tests.written_log import WrittenLog

CUSTOMER = pgoutput.relation(
    2, "public", "customer", [("id", 20, True), ("name", 25), ("note", 25)]
)
AT_US = 1_770_000_000 * 1_000_000
PROJECT = Path(__file__).parents[2]
EXTRAS_VARIABLE = "WALBROOK_TEST_PIPELINES"
"""The folder of the packages that Spark Connect and pipelines need beside pyspark."""

DELTA_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
IN_MEMORY = (
    "org.apache.spark.sql.connector.catalog.SharedTablesInMemoryRowLevelOperationTableCatalog"
)
PIPELINE = """
name: customers
storage: {storage}
catalog: {catalog}
database: shop
libraries:
  - glob:
      include: definitions/**
"""
RUN_PIPELINE = """
import json
from pathlib import Path
from pyspark.pipelines import cli
from pyspark.sql import SparkSession
from pyspark.sql.connect.session import SparkSession as Connected

builder = SparkSession.builder.remote("local[2]")
for name, value in {conf!r}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sql("CREATE NAMESPACE IF NOT EXISTS {catalog}.shop")
Connected.stop = lambda session: None  # the tables end with the server, which is ours
for _ in range(2):  # the second goes on from the first one's checkpoint
    cli.run(Path("spark-pipeline.yml"), [], False, [], False)
rows = spark.table("{catalog}.shop.customer").drop("__spark_autocdc_metadata").collect()
print("rows " + json.dumps([row.asDict() for row in rows]))
"""

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(600)]


class Source:
    """The log of one table."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._log = WrittenLog(directory)
        self._lsn = 0

    def commit(self, *messages: bytes) -> int:
        self._lsn += 100
        begin, end = pgoutput.begin(self._lsn, AT_US, 1), pgoutput.commit(self._lsn, 8, AT_US)
        self._log.append(CUSTOMER, begin, *messages, end)
        return self._lsn

    def close(self) -> None:
        self._log.close()


def insert(number: int, name: str) -> bytes:
    return pgoutput.insert(2, [str(number), name, "long"])


def update(number: int, name: str, note: Any = "long", key: int | None = None) -> bytes:
    old = None if key is None else [str(key), None, None]
    return pgoutput.update(2, [str(number), name, note], key=old)


def delete(number: int) -> bytes:
    return pgoutput.delete(2, key=[str(number), None, None])


def python(text: str, directory: Path, *, submit: str = "", path: Sequence[Path] = ()) -> str:
    """What a program prints that has a Spark of its own."""
    script = directory / "program.py"
    script.write_text(text)
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": f"{submit} pyspark-shell",
        "PYTHONPATH": os.pathsep.join(map(str, [PROJECT, *path])),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return ran.stdout + ran.stderr


def test_delta_s_own_connector_merges_the_stream(tmp_path: Path) -> None:
    source = Source(tmp_path / "log")
    whole = program("A copy of a table in Delta Lake", source.directory, tmp_path)
    ours = program("With Delta's own connector", source.directory, tmp_path)
    text = whole[: whole.index("def merge(")] + ours + whole[whole.index("query = (") :]
    conf = DELTA_CONF | {
        "spark.ui.enabled": "false",
        "spark.jars": ",".join(map(str, delta_jars())),
    }
    submit = " ".join(f"--conf {name}={value}" for name, value in conf.items())

    def copied() -> dict[int, tuple[str, str, tuple[int, int]]]:
        said = python(text, tmp_path, submit=f"--master local[2] {submit}")
        assert (tmp_path / "customer" / "_delta_log").is_dir(), said
        rows = DeltaTable(tmp_path / "customer").to_pyarrow_table().to_pylist()
        return {
            row["id"]: (row["name"], row["note"], (row["commit_lsn"], row["commit_idx"]))
            for row in rows
        }

    source.commit(insert(1, "a"), insert(2, "b"), insert(3, "c"), insert(4, "d"))
    source.commit(update(1, "a2", UNCHANGED), delete(4))
    assert copied() == {
        1: ("a2", "long", (200, 0)),
        2: ("b", "long", (100, 1)),
        3: ("c", "long", (100, 2)),
    }
    source.commit(update(2, "b2", UNCHANGED), update(30, "c2", "new", key=3), delete(1))
    assert copied() == {2: ("b2", "long", (300, 0)), 30: ("c2", "new", (300, 1))}
    (tmp_path / "_checkpoints").rename(tmp_path / "older")  # everything again
    source.commit(insert(5, "e"), pgoutput.truncate([2]), insert(6, "f"))
    assert copied() == {6: ("f", "long", (400, 2))}
    source.close()


def pipeline(directory: Path, catalog: str, conf: dict[str, str], jars: Sequence[Path]) -> str:
    """What a run of the page's pipeline prints, on a server of its own."""
    definitions = directory / "definitions"
    definitions.mkdir()
    text = program("AUTO CDC in a declarative pipeline", directory / "log", directory)
    (definitions / "customer.py").write_text(
        text.replace(".load()", '.option("maxRows", 1).load()')
    )
    storage = (directory / "storage").as_uri()
    spec = PIPELINE.format(storage=storage, catalog=catalog)
    (directory / "spark-pipeline.yml").write_text(spec)
    classes = {
        "spark.jars": ",".join(map(str, jars)),
        "spark.driver.extraClassPath": os.pathsep.join(map(str, jars)),
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
    }
    text = RUN_PIPELINE.format(conf=conf | classes, catalog=catalog)
    return python(text, directory, path=[Path(os.environ[EXTRAS_VARIABLE])])


def test_auto_cdc_keeps_a_table_at_its_newest_rows(tmp_path: Path) -> None:
    source = Source(tmp_path / "log")
    source.commit(insert(1, "a"), insert(2, "b"), insert(3, "c"), insert(4, "d"))
    source.commit(update(1, "a2"), update(1, "a3"), delete(4))
    source.commit(update(30, "c2", key=3), delete(2), insert(2, "b2"))
    source.close()
    said = pipeline(tmp_path, "lake", {"spark.sql.catalog.lake": IN_MEMORY}, row_level_tables())
    (rows,) = [line for line in said.splitlines() if line.startswith("rows ")] or [said]
    assert rows.startswith("rows "), said
    found = {row["id"]: row["name"] for row in json.loads(rows.removeprefix("rows "))}
    assert found == {1: "a3", 2: "b2", 30: "c2"}


def test_auto_cdc_refuses_delta_s_connector(tmp_path: Path) -> None:
    source = Source(tmp_path / "log")
    source.commit(insert(1, "a"))
    source.close()
    conf = DELTA_CONF | {
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.sql.sources.default": "delta",
    }
    said = pipeline(tmp_path, "spark_catalog", conf, delta_jars())
    assert "AUTOCDC_TARGET_DOES_NOT_SUPPORT_MERGE" in said
