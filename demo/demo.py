"""The demo: stream a busy shop for some seconds, then prove that everything arrived.

Invariant: every wait is bounded, and whatever was started is stopped on every way out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.live import Live

from cdc.errors import OperatorError, TransientError
from demo import ledger, progress, report
from demo.arrivals import collect
from demo.compare import compare
from demo.latency import ArrivalWatch, latencies_ms
from demo.servers import ExampleServers
from demo.service_process import ServiceProcess
from demo.shop import Shop
from demo.writer import Writer

_READY_TIMEOUT_S: Final = 120.0
_CATCH_UP_TIMEOUT_S: Final = 60.0
_LOOK_S: Final = 0.1
_PACE_S: Final = 0.004
_IMPORT_ROWS: Final = 4000
_EXISTING_ROWS: Final = 5000

Connection = psycopg.Connection[tuple[Any, ...]]


class Demo:
    """One run in one new directory."""

    def __init__(self, directory: Path, *, seconds: float, seed: int, console: Console) -> None:
        self._directory = directory
        self._seconds = seconds
        self._seed = seed
        self._console = console

    def run(self) -> bool:
        """Whether everything that was written arrived, and nothing else."""
        self._say(f"Starting Postgres in {self._directory} ...")
        with ExampleServers(self._directory, http_port=0) as servers:
            if servers.redis is None:
                self._say("No redis-server was found: going on without the sink redis.")
            with psycopg.connect(servers.postgres.dsn, autocommit=True) as connection:
                Shop(connection, random.Random(self._seed)).import_customers(_EXISTING_ROWS)
                self._say(f"The shop has {_EXISTING_ROWS:,} customers already.")
                ledger.create_ledger(connection)
                with ArrivalWatch(servers) as clock:
                    opened_at = self._stream(servers, connection)
                return self._judge(servers, connection, clock, opened_at)

    def _stream(self, servers: ExampleServers, connection: Connection) -> datetime:
        """Run the service while the shop is open, until all sinks have caught up."""
        log_path = self._directory / "service.log"
        with ServiceProcess(servers.config_path, log_path) as service:
            self._say(f"Starting the service, its log is {log_path} ...")
            self._await_ready(service, connection)
            opened_at = datetime.now(UTC)
            self._trade(servers, service, connection)
            self._say("Stopping the service ...")
            status = service.stop()
        if status != 0:
            raise OperatorError(f"the service ended with status {status}", fix=f"read {log_path}")
        return opened_at

    def _await_ready(self, service: ServiceProcess, connection: Connection) -> None:
        """Until every sink has the first transaction, and Spark's start is over."""
        started = time.monotonic()
        self._await(service, "the reader streams", lambda: progress.is_streaming(connection))
        Shop(connection, random.Random(self._seed)).open()
        first = ledger.written_count(connection)
        self._await(
            service, "the first changes arrive", lambda: progress.slowest(connection) >= first
        )
        self._say(f"They have after {time.monotonic() - started:.1f} s.")
        self._await(service, "Spark has started", lambda: progress.is_live(connection))
        self._say(f"Ready after {time.monotonic() - started:.1f} s.")

    def _await(self, service: ServiceProcess, what: str, holds: Callable[[], bool]) -> None:
        self._say(f"Waiting until {what} ...")
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not holds():
            service.require_running()
            if time.monotonic() > deadline:
                raise TransientError(
                    f"after {_READY_TIMEOUT_S:.0f} s the demo still waits until {what}",
                    fix=f"read {service.log_path}",
                )
            time.sleep(_LOOK_S)

    def _trade(
        self, servers: ExampleServers, service: ServiceProcess, connection: Connection
    ) -> None:
        """Open the shop for some seconds; then wait for the sinks, within a bound."""
        self._say(f"The shop is open for {self._seconds:g} s, with the seed {self._seed}.")
        writer = Writer(
            servers.postgres.dsn, pace_s=_PACE_S, seed=self._seed + 1, import_rows=_IMPORT_ROWS
        )
        opened = time.monotonic()
        with writer, Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                elapsed_s = time.monotonic() - opened
                closed = elapsed_s >= self._seconds
                if closed:
                    writer.stop()
                service.require_running()
                writer.require_well()
                behind = _look(connection, live, elapsed_s)
                behind = behind or not progress.is_backfilled(connection)
                if closed and (not behind or elapsed_s > self._seconds + _CATCH_UP_TIMEOUT_S):
                    break
                time.sleep(_LOOK_S)
            shown = live.renderable
        self._console.print(shown)
        self._say(f"The shop closed after {writer.transactions:,} transactions.")

    def _judge(
        self,
        servers: ExampleServers,
        connection: Connection,
        clock: ArrivalWatch,
        opened_at: datetime,
    ) -> bool:
        self._say("Comparing what was written with what arrived ...")
        written = ledger.written_changes(connection)
        state = ledger.source_state(connection)
        results = []
        for found in collect(servers, clock):
            arrived = ledger.delivered_changes(connection, found.messages)
            results.append(
                report.SinkResult(
                    compare(found.sink, written, arrived, state),
                    arrived,
                    latencies_ms(found.messages, found.arrived_at, opened_at),
                )
            )
        self._console.print(report.counts_table(written, results))
        self._console.print(report.verdict_table(results))
        for line in report.findings(results):
            self._say(line)
        return all(result.comparison.agrees for result in results)

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _look(connection: Connection, live: Live, elapsed_s: float) -> bool:
    """Show how it goes; whether a sink is behind what was written."""
    written = ledger.written_count(connection)
    consumers = progress.consumers(connection)
    live.update(report.progress_table(written, elapsed_s, consumers), refresh=True)
    return any(consumer.delivered < written for consumer in consumers)
