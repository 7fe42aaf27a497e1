"""The programs on docs/spark.md run as they stand, on a plain Spark session."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pyspark
import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests import pgoutput
from tests.fix_spark import LocalSpark
from tests.pgoutput import UNCHANGED
from tests.spark_page import program
from tests.written_log import WrittenLog

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
        builder = builder.config("spark.sql.shuffle.partitions", "2")  # each has a state of its own
        session = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
        yield
        session.stop()


class Page:
    """Runs a program of the page, as often as wanted, with its places in a folder of the test."""

    def __init__(self, directory: Path) -> None:
        self.lake = directory / "lake"
        self.log = WrittenLog(directory / "log")

    def run(self, heading: str) -> None:
        names: dict[str, Any] = {}
        exec(self.program(heading), names)
        assert names["query"].exception() is None

    def program(self, heading: str) -> str:
        return program(heading, self.log.directory, self.lake)

    def forget(self, kept_as: str) -> None:
        """The next run begins with a new checkpoint."""
        (self.lake / "_checkpoints").rename(self.lake / kept_as)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    opened = Page(tmp_path)
    yield opened
    opened.log.close()


@pytest.mark.sinks
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


@pytest.mark.sinks
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


def test_a_truncate_empties_the_delta_table(page: Page) -> None:
    def rows(*numbers: int) -> list[bytes]:
        return [pgoutput.insert(2, [str(n), "n", "long", SEEN]) for n in numbers]

    def copied() -> set[int]:
        return set(DeltaTable(page.lake / "customer").to_pyarrow_table()["id"].to_pylist())

    page.log.append(CUSTOMER, *committed(100, START_US, *rows(1, 2, 3)))
    page.run("A copy of a table in Delta Lake")
    emptied = [*rows(4), pgoutput.truncate([2]), *rows(2, 5)]
    page.log.append(CUSTOMER, *committed(200, START_US, *emptied))
    page.run("A copy of a table in Delta Lake")
    assert copied() == {2, 5}
    page.log.append(CUSTOMER, *committed(300, START_US, pgoutput.truncate([2])))
    page.run("A copy of a table in Delta Lake")
    assert copied() == set()


def test_a_compaction_in_the_middle_of_a_merge_is_survived(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(number: int, name: str) -> bytes:
        return pgoutput.update(2, [str(number), name, "long", SEEN])

    for number in (1, 2):  # a file each
        row = pgoutput.insert(2, [str(number), "old", "long", SEEN])
        page.log.append(CUSTOMER, *committed(number * 100, START_US, row))
        page.run("A copy of a table in Delta Lake")
    compacted: list[int] = []
    merge = DeltaTable.merge

    def compact_first(table: DeltaTable, *given: Any, **named: Any) -> Any:
        if not compacted:
            done = DeltaTable(page.lake / "customer").optimize.compact()
            compacted.append(done["numFilesRemoved"])
        return merge(table, *given, **named)

    monkeypatch.setattr(DeltaTable, "merge", compact_first)
    page.log.append(CUSTOMER, *committed(300, START_US, update(1, "new")))
    page.run("A copy of a table in Delta Lake")
    assert compacted == [2]
    found = DeltaTable(page.lake / "customer").to_pyarrow_table().to_pylist()
    assert {row["id"]: row["name"] for row in found} == {1: "new", 2: "old"}
    assert len(found) == 2


@pytest.mark.sinks
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


class Pipeline(ModuleType):
    """What a program says to ``pyspark.pipelines``, which needs Spark Connect to be run."""

    def __init__(self) -> None:
        super().__init__("pyspark.pipelines")
        self.views: dict[str, Callable[[], DataFrame]] = {}
        self.flow: dict[str, Any] = {}

    def temporary_view(self, view: Callable[[], DataFrame]) -> None:
        self.views[view.__name__] = view

    def create_streaming_table(self, name: str) -> None:
        self.target = name

    def create_auto_cdc_flow(self, **flow: Any) -> None:
        self.flow = flow

    def events(self) -> DataFrame:
        """All rows that the flow's source gives."""
        view = self.views[self.flow["source"]]()
        query = view.writeStream.format("memory").queryName("events").start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return SparkSession.active().table("events")

    def folded(self) -> DataFrame:
        """The newest event of each key by ``sequence_by``, if it is no delete: SCD type 1."""
        flow, keys = self.flow, ", ".join(self.flow["keys"])
        newest = f"row_number() OVER (PARTITION BY {keys} ORDER BY {flow['sequence_by']} DESC)"
        numbered = self.events().selectExpr("*", f"{newest} AS place")
        kept = numbered.where(f"place = 1 AND NOT ({flow['apply_as_deletes']})")
        return kept.drop("place", *flow["except_column_list"])


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    said = Pipeline()
    monkeypatch.setitem(sys.modules, "pyspark.pipelines", said)
    monkeypatch.setattr(pyspark, "pipelines", said, raising=False)
    return said


def test_the_stream_folded_by_its_sequence_is_the_table(page: Page, pipeline: Pipeline) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance, table = random.Random(seed), dict[int, tuple[str, str]]()

    def change() -> bytes:
        number, name = chance.randrange(20), f"n{chance.random()}"
        if number not in table:
            table[number] = (name, "long")
            return pgoutput.insert(2, [str(number), name, "long", SEEN])
        old, note = [str(number), *table[number], SEEN], table.pop(number)[1]
        if chance.random() < 0.3:
            return pgoutput.delete(2, old=old)
        other = chance.randrange(20, 40)
        moved = other if other not in table and chance.random() < 0.3 else number
        table[moved] = (name, note)
        return pgoutput.update(2, [str(moved), name, UNCHANGED, SEEN], old=old)

    for lsn in range(100, 4100, 100):
        changes = [change() for _ in range(chance.randrange(1, 8))]
        page.log.append(CUSTOMER, *committed(lsn, START_US, *changes))
    exec(page.program("AUTO CDC in a declarative pipeline"), {})

    found = {row.id: (row.name, row["Long note"]) for row in pipeline.folded().collect()}
    assert found == table
    events = SparkSession.active().table("events")
    assert events.count() == events.select(*pipeline.flow["keys"], "sequence").distinct().count()
    source = SparkSession.active().read.format("walbrook").option("table", "public.customer")
    schema = source.option("path", str(page.log.directory)).load().schema
    assert schema["record"].metadata == {"keys": pipeline.flow["keys"]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (pgoutput.update(2, ["1", "n", UNCHANGED, SEEN]), "set REPLICA IDENTITY FULL"),
        (pgoutput.truncate([2]), "refresh the target in full"),
        (pgoutput.insert(2, ["1", "n", "long", "no time"]), "cannot decode the change"),
    ],
)
def test_a_change_that_auto_cdc_would_get_wrong_stops_the_flow(
    page: Page, pipeline: Pipeline, change: bytes, says: str
) -> None:
    page.log.append(CUSTOMER, *committed(100, START_US, change))
    exec(page.program("AUTO CDC in a declarative pipeline"), {})
    with pytest.raises(StreamingQueryException, match=says):
        pipeline.events()
