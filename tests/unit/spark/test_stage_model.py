"""Feed, workers and settler under random schedules, with the state database in memory.

Invariant that is checked: every message arrives exactly once, in order, in a sink that absorbs by
cursor, and a settled cursor never passes a message that has not arrived. That holds whatever is
cut, fails, is moved, paused, or dies.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.change import MessageBatch
from cdc.config import FileDestination, SinkConfig
from cdc.connection_pool import ConnectionPool
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError
from cdc.generation import FIRST
from cdc.log.writer import LogWriter
from cdc.replication.wire.seal import Sealer
from cdc.state.active_consumers import ActiveConsumers
from cdc.state.feeds import FeedFigures
from cdc.state.positions import MovedError, Settlement
from sinks.base import Delivery
from sinks.file import FileSink
from spark_pipeline.backfill.pieces import Pieces
from spark_pipeline.delivery.deliver import Origin
from spark_pipeline.delivery.ledgers import Ledgers
from spark_pipeline.feed.body import FeedBody
from spark_pipeline.feed.feed import Feed
from spark_pipeline.feed.planner import Planner
from spark_pipeline.feed.progress import StageProgress
from spark_pipeline.feed.stage_settings import StageSettings
from spark_pipeline.slices.exchange import Exchange, PlannedRange
from spark_pipeline.stage import worker
from spark_pipeline.stage.worker import Worker
from spark_pipeline.workers import base, retries, settler
from spark_pipeline.workers.base import RestartError
from spark_pipeline.workers.context import WorkerContext
from spark_pipeline.workers.settler import Settler
from tests import pgoutput
from tests.examples import examples
from tests.log_pipeline import arrived, cursors_of
from tests.wire_messages import transaction, wire

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])
NAMES = ("a", "b", "c")
START = Cursor(8, 0)
SMALL_FEED = 2_000  # bytes: a few ranges fill it


@dataclass
class Rows:
    """What Postgres would hold; ``runs`` counts the processes."""

    cursors: dict[str, Cursor] = field(default_factory=lambda: dict.fromkeys(NAMES, START))
    paused: set[str] = field(default_factory=set)
    runs: int = 0
    away: bool = False

    def settle(
        self, _state: object, *, run: int, consumers: Mapping[str, Settlement], **_more: object
    ) -> None:
        if self.away:
            raise psycopg.OperationalError("the state database does not answer")
        if run != self.runs:
            raise TransientError("not the latest")
        for name, each in consumers.items():
            if self.cursors[name] != each.since:
                raise MovedError(name, each.since)
        self.cursors |= {name: each.cursor for name, each in consumers.items()}

    def active(self, _state: object, _source: str) -> ActiveConsumers:
        if self.away:
            raise psycopg.OperationalError("the state database does not answer")
        served = {name: at for name, at in self.cursors.items() if name not in self.paused}
        return ActiveConsumers(
            served,
            {name: self.cursors[name] for name in self.paused},
            generations=dict.fromkeys(NAMES, FIRST),
        )


class NoConnections:
    """Stands for a pool of connections that nobody asks anything."""

    @contextmanager
    def connection(self) -> Iterator[None]:
        yield None


class Stage:
    """The parts of one process, and the log and rows that outlive it."""

    def __init__(self, directory: Path, rng: random.Random, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.rng, self.rows = directory, rng, Rows()
        self.log, self._sealer = LogWriter(directory / "log"), Sealer()
        self.written: list[Cursor] = []
        self.failing: set[str] = set()
        self._number = 0
        self._open = False
        self._replace_postgres(patch)
        self._let_sinks_fail(patch)
        self.sinks = [
            SinkConfig.model_validate(
                {
                    "name": name,
                    "database": "shop",
                    "destination": FileDestination(path=directory / name),
                }
            )
            for name in NAMES
        ]
        self.settings = StageSettings(
            source="shop", term=1, origin=Origin("shop", "h", "d"), consumers=self.sinks,
            state_dsn="", log_directory=directory / "log", checkpoint_directory=directory,
            micro_batch_rows=1000, micro_batch_bytes=1 << 20,
        )  # fmt: skip
        self.write()
        self.start()

    def _replace_postgres(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(settler, "settle", self.rows.settle)
        # One thread does all: a slow machine must not let a worker wait for the settler.
        patch.setattr(settler, "_UNSETTLED_S", float("inf"))
        patch.setattr(Settler, "_connected", lambda _self: None)
        patch.setattr(worker, "read_active_consumers", self.rows.active)
        for module, name, gives in (
            (worker, "pass_gaps", {}), (worker, "left_behind", {}), (retries, "due", []),
            (base, "report_consumer", None), (Ledgers, "report", None), (Pieces, "begin", None),
        ):  # fmt: skip
            patch.setattr(module, name, lambda *_given, _gives=gives, **_named: _gives)

    def _let_sinks_fail(self, patch: pytest.MonkeyPatch) -> None:
        """One that fails takes a part, or all, of what it is sent, and says that it failed."""
        deliver = FileSink.deliver

        def fails(sink: FileSink, batch: MessageBatch, *given: Any) -> Delivery:
            if sink._directory.name not in self.failing:
                return deliver(sink, batch, *given)
            taken = self.rng.randrange(len(batch) + 1)
            if taken:
                deliver(sink, batch.slice(0, taken), *given)
            return Delivery(0, 0, TransientError("the sink failed"))

        patch.setattr(FileSink, "deliver", fails)

    def start(self) -> None:
        """What a new process does; of the last one nothing is left but files and rows."""
        self.close()
        self.rows.runs += 1
        self.feed = Feed(SMALL_FEED, patience_s=0.0)
        pool = cast(ConnectionPool, NoConnections())
        run = self.rows.runs
        self.settler = Settler("shop", 1, run, "", pool, lambda: FeedFigures(self.feed.high))
        self.exchange = Exchange.create(self.directory / "exchange")
        name = f"{self.directory} {run}"
        context = WorkerContext(
            self.settings, self.feed, self.settler, pool, self.exchange.directory, run=name
        )
        self.workers = {sink.name: Worker(sink, context) for sink in self.sinks}
        self.served: set[str] = set()
        self.feed.begin(self.log.manifest.history, self.rng.randrange(self.end + 1), ORIGIN)
        self.planner = Planner(self.settings, self.feed.history, self.exchange.directory)
        self.ended = threading.Event()
        self.body = FeedBody(
            self.feed, self.planner, self.exchange, StageProgress(), self.ended,
            little=self.settings.little,
        )  # fmt: skip
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        for each in self.workers.values():
            each.close()
        self.feed.close()
        self.body.close()
        self.planner.close()
        self.exchange.remove()

    @property
    def end(self) -> int:
        return self.log.next_batch

    def write(self) -> None:
        """A transaction in one batch, or cut in two."""
        self._number += 1
        lsn, rows = 0x100 * self._number, self.rng.randrange(1, 5)
        inserts = [pgoutput.insert(1, [str(n)]) for n in range(rows)]
        messages = [ITEM, *transaction(lsn, *inserts)]
        cut = self.rng.choice([0, self.rng.randrange(1, len(messages))])
        for part in (messages[:cut], messages[cut:]):
            sealed = self._sealer.seal(wire(*part)) if part else None
            if sealed is not None:
                self.log.append(sealed.raw, sealed.schemas, first=sealed.first, high=sealed.high)
        self.written += [Cursor(lsn, n) for n in range(rows)]

    def decode(self) -> None:
        """A range of some batches for the feed."""
        start = self.feed.position
        if start < self.end:
            end = self.rng.randrange(start, self.end) + 1
            if self.feed.depth.ranges and not self.feed._has_idle():
                self.ended.set()  # in one thread nobody would make room: the range is given up
            self.body.take_range(PlannedRange(start, end, 1))
            self.ended.clear()

    def serve(self, name: str) -> None:
        """What the thread of a worker does next."""
        each = self.workers[name]
        try:
            if name in self.served:
                each.serve_next(0.0)
            elif each.begin():
                self.served.add(name)
        except RestartError:
            self.served.discard(name)
        except Exception as error:
            self.served.discard(name)
            each.failed(error)

    def step(self) -> None:
        name = self.rng.choice(NAMES)
        act = self.rng.choices(
            ["write", "decode", "serve", "settle", "fail", "mend", "rewind", "pause", "resume",
             "nudge", "crash", "away"], [4, 6, 20, 5, 2, 3, 1, 1, 2, 1, 1, 1],
        )[0]  # fmt: skip
        if act == "write":
            self.write()
        elif act == "decode":
            self.decode()
        elif act == "serve" and not self._would_wait(name):
            self.serve(name)
        elif act == "settle":
            self.settler.write()
        elif act == "fail":
            self.failing.add(name)
        elif act == "mend":
            self.failing.discard(name)
        elif act == "rewind":
            places = [at for at in self.written if at <= self.rows.cursors[name]]
            self.rows.cursors[name] = self.rng.choice([START, *places])
        elif act == "pause":
            self.rows.paused.add(name)
        elif act == "resume":
            self.rows.paused.discard(name)
        elif act == "nudge":
            self.served.discard(name)
        elif act == "crash":
            self.start()
        elif act == "away":
            self.rows.away = not self.rows.away

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.check()

    def _would_wait(self, name: str) -> bool:
        """In one thread nobody would let the state database answer meanwhile."""
        return self.rows.away and (name not in self.served or bool(self.failing))

    def check(self) -> None:
        for name in NAMES:
            got = cursors_of(arrived(self.directory / name))
            assert got == self.written[: len(got)], f"{name} has a gap, a repeat or no order"
            passed = [at for at in self.written if at < self.rows.cursors[name]]
            assert len(passed) <= len(got), f"the cursor of {name} passed what it does not have"

    def finish(self) -> None:
        """All is mended: all arrives, and all is settled."""
        self.failing.clear()
        self.rows.paused.clear()
        self.rows.away = False
        self.settler.write()
        self.served.clear()  # the stage looks for cursors that an operator moved each second
        for _ in range(3 * self.end + 20):
            self.decode()
            for name in NAMES:
                self.serve(name)
            self.settler.write()
        assert self.settler.failure is None
        for name in NAMES:
            assert cursors_of(arrived(self.directory / name)) == self.written
            assert self.rows.cursors[name] > self.written[-1]


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_message_arrives_once_and_in_order_and_no_cursor_passes_one_that_did_not(
    seed: int,
) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        stage = Stage(Path(directory), rng, patch)
        stage.run(120)
        stage.finish()
        stage.close()
        stage.log.close()


@pytest.mark.parametrize("broken", ["settles ahead", "skips a range"])
def test_the_invariant_is_seen_to_fail_where_the_stage_is_broken(broken: str) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        stage = Stage(Path(directory), random.Random(1), patch)
        if broken == "settles ahead":
            whole = Settler.report

            def ahead(self: Settler, name: str, report: settler.Report, **given: bool) -> None:
                whole(self, name, report, **given)
                stage.rows.cursors[name] = Cursor(0x100_000, 0)

            patch.setattr(Settler, "report", ahead)
        else:
            patch.setattr(Planner, "judge", lambda _, share: replace(share, slices=[]))
        with pytest.raises(AssertionError):
            stage.run(300)
        stage.close()
        stage.log.close()
