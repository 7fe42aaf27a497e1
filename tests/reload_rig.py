"""Reload on real servers: destinations as somebody reads them, and a source that lost changes.

Beyond what a rig does, the source can change rows that its publication does not send, so that any
destination goes wrong in the same way, and a reader looks at the destination all the time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cdc.config import SinkConfig
from spark_pipeline.delivery.deliver import _open_sinks
from tests.backfill_rig import Rig
from tests.fix_postgres import Database
from tests.lake import query, query_iceberg
from tests.walbrook_service import _url

WAYS = [
    "postgres mirror", "postgres append", "delta upsert", "delta append", "iceberg on_read",
    "iceberg copy_on_write", "iceberg append",
]  # fmt: skip
MERGING = [way for way in WAYS if not way.endswith("append")]

PHANTOMS = 100
"""Rows that the destination keeps though the source has deleted them."""

_MADE = """
CREATE TABLE item (id int PRIMARY KEY, version int NOT NULL, body text);
ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
INSERT INTO item SELECT i, 1, repeat('b' || i, 700) FROM generate_series(1, {rows}) AS i
"""
_LAST = """
SELECT id, version FROM (
    SELECT id, version, walbrook_action AS act, row_number() OVER (
        PARTITION BY id ORDER BY walbrook_lsn DESC, walbrook_idx DESC) AS nth FROM {table}) s
 WHERE nth = 1 AND act <> 'delete'
"""


def close_sinks() -> None:
    """A process keeps its sinks; a test must not leave a thread or a connection behind."""
    while _open_sinks:
        _open_sinks.popitem()[1][2].close()


@dataclass
class Reloading:
    """A rig whose table ``item`` is delivered in one of ``WAYS``."""

    way: str
    database: Database
    there: Database
    directory: Path
    rows: int = 3_000
    rig: Rig = field(init=False)

    def __post_init__(self) -> None:
        self.database.execute(_MADE.format(rows=self.rows))
        destination = self.destination
        given = {"destination": destination}
        self.rig = Rig(self.database, self.directory, publication="FOR TABLE item", sink=given)
        sink = SinkConfig.model_validate({"name": "files", "database": "shop", **given})
        assert sink.reload_refusal is None

    @property
    def destination(self) -> dict[str, Any]:
        kind, mode = self.way.split()
        if kind == "postgres":
            return {"type": kind, "url": _url(self.there.dsn), "mode": mode}
        lake: dict[str, Any] = {"path": str(self.directory / "lake"), "max_delay_ms": 100}
        if mode in ("on_read", "copy_on_write"):
            return {"type": kind, "mode": "upsert", "merge": mode, **lake}
        return {"type": kind, "mode": mode, **lake}

    def held(self) -> dict[int, int]:
        """What a reader finds now: the version of each row."""
        append = self.way.endswith("append")
        table = "item" if self.way.startswith("postgres") else "t"
        found = self.select(
            _LAST.format(table=table) if append else f"SELECT id, version FROM {table}"
        )
        held = dict(found)
        assert len(held) == len(found), "a key is there twice"
        return held

    def select(self, sql: str) -> list[tuple[Any, ...]]:
        """What a reader of the destination finds; the table is ``item`` in Postgres, else ``t``."""
        if self.way.startswith("postgres"):
            return self.there.execute(sql)
        if self.way.startswith("delta"):
            return query(sql, t=self.directory / "lake" / "public" / "item")
        ((place,),) = self.database.execute(
            "SELECT metadata_location FROM walbrook.iceberg_tables "
            "WHERE (table_namespace, table_name) = ('public', 'item')"
        )
        return query_iceberg(sql, t=place)

    def source(self) -> dict[int, int]:
        return dict(self.database.execute("SELECT id, version FROM item"))

    def shadows(self) -> list[str]:
        """The shadows that are at the destination, whoever knows of them."""
        if self.way.startswith("postgres"):
            found = self.there.execute(
                "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'reload%'"
            )
            return [str(name) for (name,) in found]
        if self.way.startswith("delta"):
            return [str(path) for path in (self.directory / "lake").glob("_walbrook/reload*")]
        rows = self.database.execute(
            "SELECT table_name FROM walbrook.iceberg_tables WHERE table_name LIKE 'reload%'"
        )
        try:
            files = [*(self.directory / "lake").glob("_walbrook_files/reload*/**/*.parquet")]
        except FileNotFoundError:
            return ["a folder that is being removed"]
        return [str(name) for (name,) in rows] + [str(path) for path in files]

    def go_wrong(self) -> None:
        """Rows change without the destination hearing of it: it keeps some, and lacks others."""
        self.database.execute("ALTER PUBLICATION pub DROP TABLE item")
        self.database.execute(f"DELETE FROM item WHERE id <= {PHANTOMS}")
        self.database.execute(
            "INSERT INTO item SELECT 100000 + i, 1, 'new' FROM generate_series(1, 50) AS i"
        )
        self.database.execute("UPDATE item SET body = 'hidden' WHERE id % 7 = 0")
        self.database.execute("ALTER PUBLICATION pub ADD TABLE item")

    def is_wrong(self, held: dict[int, int]) -> bool:
        """Whether these are rows of the table before the swap; AssertionError for a mixture."""
        phantoms = sum(key <= PHANTOMS for key in held)
        lacking = 50 - sum(100_000 < key < 200_000 for key in held)
        assert (phantoms, lacking) in ((PHANTOMS, 50), (0, 0)), (phantoms, lacking)
        return bool(phantoms)

    @contextmanager
    def changing(self, writers: int = 2) -> Iterator[None]:
        """Writers that raise the versions of rows, and insert and delete others, until the end."""
        ended = threading.Event()
        failures: list[BaseException] = []

        def write(seed: int) -> None:
            rng = random.Random(seed)
            try:
                with self.database.connect() as connection:
                    while not ended.wait(0.01):
                        key = rng.randrange(PHANTOMS + 1, self.rows)
                        more = 1_000_000 + rng.randrange(1_000)
                        connection.execute(
                            f"UPDATE item SET version = version + 1 WHERE id = {key}".encode()
                        )
                        connection.execute(
                            f"INSERT INTO item VALUES ({more}, 1, 'x') ON CONFLICT (id) DO UPDATE "
                            "SET version = item.version + 1".encode()
                        )
                        if rng.random() < 0.3:
                            connection.execute(
                                f"DELETE FROM item WHERE id = {1_001_000 + rng.randrange(9)}; "
                                f"INSERT INTO item VALUES ({1_001_000 + rng.randrange(9)}, 1, 'y')"
                                " ON CONFLICT DO NOTHING".encode()
                            )
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(seed,)) for seed in range(writers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join(30)
        assert not failures, failures

    @contextmanager
    def watched(self) -> Iterator[list[bool]]:
        """A reader that looks all the time; yields what it saw: whether the table was wrong yet.

        It fails the test if it sees a table that is neither the old nor the new one, the old one
        after the new one, a row less than before, or a row that goes back in time.
        """
        ended = threading.Event()
        seen: list[bool] = []
        failures: list[BaseException] = []

        def look() -> None:
            newest: dict[int, int] = {}
            try:
                while not ended.is_set():
                    held = self.held()
                    wrong = self.is_wrong(held)
                    assert not (wrong and False in seen), "the old table is back"
                    kept = {key for key in newest if PHANTOMS < key <= self.rows}
                    assert kept <= held.keys(), "rows are gone"
                    for key, version in held.items():
                        if key < 1_001_000:  # others are deleted and made anew
                            assert version >= newest.get(key, 0), (key, version, newest[key])
                            newest[key] = version
                    seen.append(wrong)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join(60)
        if failures:
            raise failures[0]

    def until_equal(self) -> None:
        self.rig.until_delivered()
        assert self.held() == self.source()


def _marked(names: list[str]) -> list[object]:
    """One of Postgres and one of a lake for ``make test``, the others for ``make test-sinks``."""
    first = ("postgres mirror", "delta upsert")
    return [pytest.param(way, marks=[] if way in first else pytest.mark.sinks) for way in names]


ways = pytest.mark.parametrize("way", _marked(WAYS))
merging = pytest.mark.parametrize("way", _marked(MERGING))
