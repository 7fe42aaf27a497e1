"""What is done for tables beside deliveries: small files are merged, files of old versions go.

Invariants: it runs in a thread of its own and holds no lock that a delivery takes; a merge that a
delivery was faster than is dropped; what fails here fails no delivery, is logged, and is tried
again the next time. Files of old versions go once a day, also those of a table to which nothing is
written any more. One merge reads files of at most ``target_file_bytes`` together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pyarrow as pa
import structlog

from cdc.errors import WalbrookError
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.table import ConflictError, DataFile, LakeTable

_logger = structlog.get_logger("walbrook.sink.lakehouse")

_FILES_MIN = 4  # fewer are not worth a commit
_MERGES_MAX = 8  # of one table at a time
_DELETED_PART = 0.1  # of a file's rows: with more deletes a file is rewritten
_VACUUM_EVERY = 24 * 3600.0
_STOP_S = 30.0


@dataclass(frozen=True)
class MaintenancePlan:
    """How often, up to which size files are merged, and how long old versions are kept."""

    interval_s: float
    target_file_bytes: int
    retain_hours: int


class Maintainer:
    """The thread of one sink; it begins with the first table that something was written to."""

    def __init__(
        self, open_table: Callable[[LakeTarget], LakeTable], plan: MaintenancePlan
    ) -> None:
        self._open_table = open_table
        self._plan = plan
        self._written: set[LakeTarget] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._until_vacuum: dict[LakeTarget, float] = {}

    def wrote(self, target: LakeTarget) -> None:
        """Something was committed to a table: it is looked after the next time."""
        with self._lock:
            self._written.add(target)
            if self._thread is None:
                self._stop.clear()
                self._thread = threading.Thread(target=self._run, name="lakehouse", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End; a merge that is under way is waited for, within a bound."""
        self._stop.set()
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_STOP_S)

    def run_once(self) -> None:
        """Merge files of the tables written to since the last time, and vacuum all that are due."""
        with self._lock:
            written, self._written = self._written, set()
        for target in sorted(written.union(self._until_vacuum)):
            if self._stop.is_set():
                return
            has_more = target in written
            try:
                has_more = has_more and self._merge(target)
                self._vacuum_if_due(target)
            except (WalbrookError, pa.ArrowException, OSError) as error:
                _logger.warning("lakehouse.maintenance_failed", table=str(target), error=error)
            if has_more:
                with self._lock:
                    self._written.add(target)

    def _run(self) -> None:
        while not self._stop.wait(self._plan.interval_s):
            self.run_once()

    def _merge(self, target: LakeTarget) -> bool:
        """Returns whether there may be more to merge than is merged at a time."""
        table = self._open_table(target)
        for _ in range(_MERGES_MAX):
            if self._stop.is_set() or not merge_small_files(table, self._plan.target_file_bytes):
                return False
        return True

    def _vacuum_if_due(self, target: LakeTarget) -> None:
        # Due from now on: what fails is tried again, whether more is written to the table or not.
        left_s = self._until_vacuum.setdefault(target, 0.0) - self._plan.interval_s
        if left_s <= 0:
            table = self._open_table(target)
            if table.load() is None:
                self._until_vacuum.pop(target, None)
                return
            gone = table.vacuum(self._plan.retain_hours)
            if gone:
                _logger.info("lakehouse.vacuumed", table=str(target), files=gone)
            left_s = _VACUUM_EVERY
        self._until_vacuum[target] = left_s


def merge_small_files(table: LakeTable, target_bytes: int) -> bool:
    """Write some small files of one partition as one, or rewrite one that has many deletes.

    Returns whether there were any.
    """
    if table.load() is None:
        return False
    files = table.files()
    chosen = _small(files, target_bytes) or _much_deleted(files)
    if not chosen:
        return False
    try:
        rows = pa.concat_tables([table.read(file) for file in chosen])
        added = table.write(rows) if rows.num_rows else []
        table.commit(added, chosen, None)
    except ConflictError:
        return False
    _logger.info(
        "lakehouse.merged", table=table.place, files=len(chosen), rows=sum(f.rows for f in added)
    )
    return True


def _small(files: Iterable[DataFile], target_bytes: int) -> list[DataFile]:
    """The most small files of a partition that make one of about the size; none if few."""
    by_partition: dict[tuple[tuple[str, str | None], ...], list[DataFile]] = {}
    for file in files:
        if file.size < target_bytes // 2:
            by_partition.setdefault(tuple(sorted(file.partition.items())), []).append(file)
    most: list[DataFile] = []
    for small in by_partition.values():
        chosen, size = [], 0
        for file in sorted(small, key=lambda each: each.size):
            if size + file.size > target_bytes:
                break
            chosen.append(file)
            size += file.size
        most = max(most, chosen, key=len)
    return most if len(most) >= _FILES_MIN else []


def _much_deleted(files: Iterable[DataFile]) -> list[DataFile]:
    """The file whose readers have to look up the most deleted keys, if these are many."""
    many = [file for file in files if file.deletes and file.deletes >= file.rows * _DELETED_PART]
    return [max(many, key=lambda each: each.deletes)] if many else []
