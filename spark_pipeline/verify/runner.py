"""The verifications of one consumer, one after another, in a thread of their own.

The thread runs while there is something to do, and is started when the stage sees that. What it
does is in ``walbrook.verifications``; a verification that a crash interrupted begins again.

Invariants: one table is compared at a time. What cannot be compared fails with the reason and holds
nothing else up. A transient error is tried again a bounded number of times.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import psycopg
import structlog

from cdc.backfill.reading import connect_to_read
from cdc.backfill.table import published_tables, sent_as
from cdc.backoff import pause_s
from cdc.config import SinkConfig
from cdc.config.table import TableName
from cdc.connection import Connection, connect
from cdc.error_text import public_text
from cdc.errors import OperatorError, TransientError, WalbrookError
from cdc.state import verifications as rows
from cdc.state.active_consumers import read_active_consumers
from cdc.state.verifications import CancelledError, Verification, VerificationRow
from cdc.verify.comparable import require_comparable
from spark_pipeline.backfill.held_rows import open_to_read
from spark_pipeline.delivery.isolate import as_walbrook_error
from spark_pipeline.delivery.value_formats import form_of
from spark_pipeline.verify.comparison import EndedError, TableComparison
from spark_pipeline.verify.repair import repair
from spark_pipeline.workers.context import WorkerContext

_logger = structlog.get_logger("walbrook.verify")

_ATTEMPTS_MAX: Final = 5
_PAUSE_S: Final = 1.0


class VerifyRunner:
    """That of one consumer; ``wake`` may be called from any thread."""

    def __init__(self, consumer: SinkConfig, context: WorkerContext) -> None:
        self._consumer, self._context = consumer, context
        self._settings = context.settings
        self._source, self._term = self._settings.source, self._settings.term
        self._directory = self._settings.log_directory / "verify" / consumer.name
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._attempts: dict[int, int] = {}  # by verification

    def wake(self) -> None:
        """There may be something to do: look now."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name=f"verify-{self._consumer.name}", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while not self._context.ended.is_set():
            try:
                with connect(self._settings.state_dsn, name=f"{self._source}:verify") as state:
                    found = rows.next_verification(state, self._source, self._consumer.name)
                    if found is None:
                        return
                    self._take(state, found)
            except EndedError:
                return
            except CancelledError:
                continue
            except (psycopg.Error, WalbrookError) as error:
                _logger.warning(
                    "verify.look_failed",
                    consumer=self._consumer.name,
                    error=as_walbrook_error(error),
                )
                self._context.ended.wait(_PAUSE_S)

    def _take(self, state: Connection, verification: Verification) -> None:
        """Do one verification; what fails of it is in its row."""
        try:
            table = self._table(state, verification)
            if table is not None:
                with self._scratch() as directory:
                    self._verify(state, verification, table, directory)
        except (CancelledError, EndedError, psycopg.Error):
            raise
        except TransientError as error:
            attempts = self._attempts[verification.id] = self._attempts.get(verification.id, 0) + 1
            if attempts >= _ATTEMPTS_MAX:
                self._fail(state, verification, error)
                return
            wait_s = pause_s(attempts, 2 * _PAUSE_S, _PAUSE_S * 2**_ATTEMPTS_MAX)
            row = VerificationRow(state, self._source, self._term, verification.id)
            row.advance("reading", reason=f"it is tried again in {wait_s:.0f} s: {error}")
            self._context.ended.wait(wait_s)
        except Exception as error:
            self._fail(state, verification, as_walbrook_error(error))

    def _table(self, state: Connection, verification: Verification) -> TableName | None:
        """The table to compare; None if one verification per table took its place."""
        publication = self._settings.publication
        takes = self._consumer.source.takes
        name = f"{self._source}:verify"
        try:
            with closing(connect_to_read(self._settings.source_dsn, name)) as connection:
                there = published_tables(connection, publication)
                if verification.table is None:
                    tables = [each for each in there if takes(each.schema, each.table)]
                    if not tables:
                        raise OperatorError(
                            f"no published table is one of consumer {self._consumer.name}",
                            fix=f"add tables to the publication {publication}",
                            kind="nothing_to_compare",
                        )
                else:
                    tables = sent_as(connection, publication, verification.table)
        except psycopg.Error as error:
            raise TransientError(
                f"source {self._source} cannot be read: {public_text(error)}",
                fix="it is tried again",
            ) from error
        if tables != [verification.table]:
            rows.split_verification(state, self._source, self._term, verification.id, tables)
            return None
        (table,) = tables
        if not takes(table.schema, table.table):
            raise OperatorError(
                f"consumer {self._consumer.name} takes no changes of {table}",
                fix="add the table to its source in the configuration",
                kind="not_taken",
            )
        require_comparable(self._consumer, table, there)
        return table

    def _verify(
        self, state: Connection, verification: Verification, table: TableName, directory: Path
    ) -> None:
        row = VerificationRow(state, self._source, self._term, verification.id)
        generation = read_active_consumers(state, self._source).generations[self._consumer.name]
        state_dsn = self._settings.state_dsn
        opened = open_to_read(self._consumer, self._source, generation, state_dsn)
        with closing(opened) as sink:
            comparison = TableComparison(
                self._context, state, row, consumer=self._consumer.name, table=table, sink=sink,
                values=form_of(self._consumer), directory=directory,
            )  # fmt: skip
            found = comparison.run()
            row.found(found)
            if verification.repair and found.differences:
                repair(comparison, state, row, self._consumer.name, table, found)
            else:
                row.finish()
        _logger.info(
            "verify.done", consumer=self._consumer.name, table=str(table),
            differences=len(found.differences), changing=found.changing,
        )  # fmt: skip

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """An empty directory, removed at the end; what a process that died left is removed too."""
        shutil.rmtree(self._directory, ignore_errors=True)
        for folder in (self._directory.parent, self._directory):
            folder.mkdir(exist_ok=True, mode=0o700)  # keys are private
        try:
            yield self._directory
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _fail(self, state: Connection, verification: Verification, error: WalbrookError) -> None:
        _logger.warning(
            "verify.failed", consumer=self._consumer.name, table=str(verification.table),
            error=error,
        )  # fmt: skip
        rows.fail_verification(state, self._source, self._term, verification.id, str(error))
