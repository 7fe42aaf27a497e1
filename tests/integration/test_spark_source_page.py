"""The programs on docs/spark.md run as they stand, on a plain Spark session."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tests import pgoutput
from tests.fix_spark import LocalSpark
from tests.pgoutput import UNCHANGED
from tests.written_log import WrittenLog

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
NUMERIC_10_2 = ((10 << 16) | 2) + 4
ORDERS = pgoutput.relation(
    1,
    "public",
    "orders",
    [("id", 20, True), ("country", 25), ("total", 1700)],
    typmod=NUMERIC_10_2,
)
CUSTOMER = pgoutput.relation(
    2, "public", "customer", [("id", 20, True), ("name", 25), ("Long note", 25), ("seen", 1184)]
)
MINUTE_US = 60_000_000
START_US = 1_770_000_000 * 1_000_000 // MINUTE_US * MINUTE_US
SEEN = "2026-02-03 04:05:06+00"

pytestmark = pytest.mark.timeout(240)


def committed(lsn: int, at_us: int, *messages: bytes) -> list[bytes]:
    return [pgoutput.begin(lsn, at_us, lsn), *messages, pgoutput.commit(lsn, lsn + 8, at_us)]


@pytest.fixture(scope="module", autouse=True)
def plain_session(local_spark: LocalSpark) -> Iterator[None]:
    """The session that the programs find, as a job is given one.

    Its master is said: the JVM of this process may be the one of a cluster that is gone.
    """
    local_spark.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
        yield
        session.stop()


class Page:
    """Runs a program of the page, as often as wanted, with its places in a folder of the test."""

    def __init__(self, directory: Path) -> None:
        self.lake = directory / "lake"
        self.log = WrittenLog(directory / "log")

    def run(self, heading: str) -> None:
        section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
        program = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
        program = program.replace("/var/lib/walbrook/log/shop", str(self.log.directory))
        names: dict[str, Any] = {}
        exec(program.replace('"/lake/', f'"{self.lake}/'), names)
        assert names["query"].exception() is None

    def forget(self, kept_as: str) -> None:
        """The next run begins with a new checkpoint."""
        (self.lake / "_checkpoints").rename(self.lake / kept_as)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    opened = Page(tmp_path)
    yield opened
    opened.log.close()


def test_minutes_are_summed_and_written_once_when_they_are_over(page: Page) -> None:
    def order(number: int, country: str, total: str) -> None:
        row = pgoutput.insert(1, [str(number), country, total])
        change = pgoutput.update(1, [str(number), country, "1000.00"])
        page.log.append(
            ORDERS, *committed(number * 100, START_US + number * 10_000_000, row, change)
        )

    for number in range(1, 30):  # every ten seconds, so up to the fifth minute
        order(number, "AT" if number % 3 else "CH", "1.25")
    page.run("Sums over windows")
    for number in range(30, 40):
        order(number, "AT", "2.00")
    page.run("Sums over windows")

    written = SparkSession.builder.getOrCreate().read.parquet(str(page.lake / "orders_by_minute"))
    found = {
        (row.minute.start.replace(tzinfo=None), row.country): (row.orders, row.total)
        for row in written.collect()
    }
    assert written.count() == len(found)
    starts = sorted({minute for minute, _ in found})
    assert len(starts) == 5
    assert sum(count for count, _ in found.values()) == 29
    assert found[starts[0], "AT"] == (4, Decimal("5.00"))
    assert found[starts[0], "CH"] == (1, Decimal("1.25"))


def test_a_delta_table_follows_a_table(page: Page) -> None:
    def commit(lsn: int, *messages: bytes) -> None:
        page.log.append(CUSTOMER, *committed(lsn, START_US, *messages))

    def insert(number: int, name: str, note: str | None = "long") -> bytes:
        return pgoutput.insert(2, [str(number), name, note, SEEN])

    def update(number: int, name: str, note: Any, key: int | None = None) -> bytes:
        old = None if key is None else [str(key), None, None, None]
        return pgoutput.update(2, [str(number), name, note, SEEN], key=old)

    def delete(number: int) -> bytes:
        return pgoutput.delete(2, key=[str(number), None, None, None])

    def copied() -> dict[int, tuple[str, str | None, tuple[int, int]]]:
        rows = DeltaTable(page.lake / "customer").to_pyarrow_table().to_pylist()
        assert all(row["seen"] == datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC) for row in rows)
        return {
            row["id"]: (row["name"], row["Long note"], (row["commit_lsn"], row["commit_idx"]))
            for row in rows
        }

    commit(100, insert(1, "a"), insert(2, "b"), insert(3, "c"), insert(4, "d"))
    commit(200, update(1, "a2", "longer"), update(1, "a3", UNCHANGED), delete(4))
    commit(240, insert(9, "x"), delete(9))
    page.run("A copy of a table in Delta Lake")
    assert copied() == {
        1: ("a3", "longer", (200, 1)),
        2: ("b", "long", (100, 1)),
        3: ("c", "long", (100, 2)),
    }

    commit(300, update(2, "b2", UNCHANGED), update(30, "c2", None, key=3))
    commit(340, delete(1), insert(1, "new"))
    commit(400, delete(2), insert(5, "e"))
    page.run("A copy of a table in Delta Lake")
    after = {
        1: ("new", "long", (340, 1)),
        5: ("e", "long", (400, 1)),
        30: ("c2", None, (300, 1)),
    }
    assert copied() == after

    version = DeltaTable(page.lake / "customer").version()
    page.run("A copy of a table in Delta Lake")  # nothing new
    assert DeltaTable(page.lake / "customer").version() == version

    whole, page.log = page.log, WrittenLog(page.lake / "older log")
    with closing(page.log):
        commit(100, insert(1, "a"), insert(2, "b"))
        page.forget("checkpoint of the whole log")
        page.run("A copy of a table in Delta Lake")  # the first changes again
    assert copied() == after | {2: ("b", "long", (100, 1))}
    page.log = whole
    page.forget("checkpoint of the older log")
    page.run("A copy of a table in Delta Lake")  # everything again
    assert copied() == after


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            pgoutput.insert(2, ["1", "n", "long", "no time"]),
            "cannot decode the change at 0/64:0",
        ),
        (
            pgoutput.update(2, ["2", "n", UNCHANGED, SEEN], key=["1", None, None, None]),
            "set REPLICA IDENTITY FULL",
        ),
    ],
)
def test_a_row_that_is_not_whole_stops_the_copy(page: Page, change: bytes, says: str) -> None:
    page.log.append(CUSTOMER, *committed(100, START_US, change))
    with pytest.raises(StreamingQueryException, match=says):
        page.run("A copy of a table in Delta Lake")
    assert not (page.lake / "customer").exists()
