"""A large micro-batch on a cluster: rows go through Spark, because machines share no memory.

Partitions decode what they fetch from the log's server; the rows stay where they were decoded
(``persist``), and each consumer takes its own from there. Invariants: a consumer gets its rows as
one sorted partition; what is lost with an executor is read again from the log, so it is the same
again.

A file sink writes to a directory of the service's own host: its share is decoded again and
delivered there. Parquet files are written by an executor if it sees the sink's directory, on
storage that both machines share, else by the driver. Verdicts of expressions are broadcast.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from operator import and_
from pathlib import Path

import numpy as np
import pyarrow as pa
import structlog
from pyspark import Broadcast, StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from cdc.config import Config, Database
from cdc.config.destination import (
    Destination,
    FileDestination,
)
from cdc.config.hosts import is_cluster
from cdc.config.lakehouse import IcebergDestination, LakeDestination
from cdc.config.parquet import ParquetDestination
from cdc.cursor import Cursor
from cdc.decoding.format import Wanted
from cdc.errors import WalbrookError
from cdc.log.flight.wire import CA_VARIABLE, TOKEN_VARIABLE
from sinks.directory import disk_error, make_directories
from sinks.parquet import OWN_FOLDER
from spark_pipeline.delivery.deliver import Share, deliver_changes
from spark_pipeline.delivery.matching import Match
from spark_pipeline.delivery.outcome import Outcome, combined
from spark_pipeline.feed.plan import set_job_group
from spark_pipeline.jvm.arrow_map import map_in_arrow
from spark_pipeline.slices.exchange import SliceMarker
from spark_pipeline.slices.raw_rows import LogSlice
from spark_pipeline.source.marked_rows import MARKER, markers_in
from spark_pipeline.source.options import Options
from spark_pipeline.source.range_reader import LogPartition, RangeReader

__all__ = ["ClusterPlan", "cluster_options", "executor_environment", "is_cluster", "rows_of"]

_logger = structlog.get_logger("walbrook.cluster")

_unshared: set[tuple[str, str]] = set()
"""Source and consumer of Parquet sinks whose directory some executor did not see."""


def cluster_options(config: Config, database: Database) -> dict[str, str]:
    """What the query of a source tells it on a cluster, besides what it always does."""
    flight = config.log.flight
    scheme = "grpc+tls" if flight.certificate is not None else "grpc"
    where = f"{scheme}://{flight.advertised}:{flight.port}/{database.name}"
    return {"markers": "true", "executorPath": where}


def executor_environment(config: Config) -> dict[str, str]:
    """What executors need to read the log from its server."""
    found = {
        TOKEN_VARIABLE: os.environ.get(TOKEN_VARIABLE),
        CA_VARIABLE: config.log.flight.ca_file,
    }
    return {name: value for name, value in found.items() if value}


class ClusterPlan:
    """Decode in the source's partitions, deliver each consumer's share where there is room."""

    name = "cluster"
    in_driver = False
    decoded_bytes = 0

    def __init__(
        self, frame: DataFrame, pool: str, log: Path, history: int, wanted: Wanted
    ) -> None:
        self._frame = frame.persist(StorageLevel.MEMORY_AND_DISK)
        self._pool = pool
        self._log, self._history, self._wanted = log, history, wanted

    def decode(self) -> list[SliceMarker]:
        marker = f.col(MARKER)
        return markers_in(self._frame.where(marker.isNotNull()).select(marker).toArrow())

    def deliver(self, share: Share) -> Outcome:
        """Blocks; several shares may be delivered at once, each from a thread of its own."""
        place = (share.origin.name, share.consumer.name)
        if not _is_of_this_host(share.consumer.destination) and place not in _unshared:
            outcomes = self._on_executor(share)
            if None not in outcomes:
                # Spark may find that there is nothing to do, and start no task.
                found = [each for each in outcomes if each is not None]
                return combined(found or [Outcome(share.consumer.name, share.end)])
            _unshared.add(place)
            _logger.info("cluster.directory_not_shared", consumer=share.consumer.name)
        return deliver_changes(share, self.changes(share.slices))

    def _on_executor(self, share: Share) -> list[Outcome | None]:
        """Deliver the share as a task; None stands for a directory that the executor lacks."""
        context = self._frame.sparkSession.sparkContext
        set_job_group(context, self._pool, share)
        mine = self._frame.where(_takes(share)).select(*self._wanted.schema.names)
        ordered = mine.coalesce(1).sortWithinPartitions("commit_lsn", "commit_idx")
        verdicts = None
        if share.verdicts is not None:
            verdicts = context.broadcast(Path(share.verdicts).read_bytes())
        try:
            task = partial(_deliver_part, replace(share, slices=[]), _mark(share), verdicts)
            packed = map_in_arrow(ordered, task, "outcome binary").toArrow().column("outcome")
        finally:
            if verdicts is not None:
                verdicts.destroy()
        outcomes = [pickle.loads(each.as_buffer()) for each in packed]
        for outcome in outcomes:
            if isinstance(outcome, WalbrookError):
                raise outcome
        return outcomes

    def changes(self, slices: Sequence[SliceMarker]) -> Iterator[pa.RecordBatch]:
        """What was decoded of some slices, decoded again from the log on this host."""
        return rows_of(self._log, self._history, self._wanted, slices)

    def fetch(self, share: Share) -> Iterator[pa.RecordBatch]:
        set_job_group(self._frame.sparkSession.sparkContext, self._pool, share)
        mine = self._frame.where(_takes(share)).select(*self._wanted.schema.names).toArrow()
        lsn, idx = (mine.column(name).to_numpy() for name in ("commit_lsn", "commit_idx"))
        order = pa.array(np.lexsort((idx, lsn)))  # Spark does not promise that it keeps the log's
        return iter(mine.cast(self._wanted.schema).take(order).to_batches())

    def close(self) -> None:
        self._frame.unpersist()


def rows_of(
    log: Path, history: int, wanted: Wanted, slices: Sequence[SliceMarker]
) -> Iterator[pa.RecordBatch]:
    """The rows of ordered slices that lie in no file, from a log on this host."""
    reader = RangeReader(Options.read({"path": str(log), "wanted": wanted.to_text()}))
    for run in _runs(slices):
        first, last = run[0].batch_idx, run[-1].batch_idx + 1
        yield from reader.read(LogPartition(first, last, history, run))
    reader.close()


def _runs(markers: Sequence[SliceMarker]) -> Iterator[list[LogSlice]]:
    """Ordered slices as the log is read: one of each batch, of batches that follow each other."""
    run: list[LogSlice] = []
    for marker in markers:
        piece = LogSlice(marker.batch_idx, marker.offset, marker.offset + marker.rows)
        if run and (run[-1].batch_idx, run[-1].stop) == (piece.batch_idx, piece.start):
            run[-1] = run[-1]._replace(stop=piece.stop)
        elif run and run[-1].batch_idx + 1 != piece.batch_idx:
            yield run
            run = [piece]
        else:
            run.append(piece)
    if run:
        yield run


def _takes(share: Share) -> Column:
    """What Spark can leave out for the share without decoding; ``deliver`` looks again."""
    match = Match.of(share.consumer)
    schema, table = f.col("table_schema"), f.concat_ws(".", "table_schema", "table_name")
    tables = [~schema.isin(*match.exclude_schemas), ~table.isin(*match.exclude_tables)]
    if match.include_schemas is not None:
        tables.append(schema.isin(*match.include_schemas))
    if match.include_tables is not None:
        tables.append(table.isin(*match.include_tables))
    action = f.col("action")
    return (
        f.col(MARKER).isNull()
        & action.isin(*match.actions)
        & _at_or_above(share.start)
        & ~_at_or_above(share.end)
        & ((action == "message") | reduce(and_, tables))
    )


def _at_or_above(cursor: Cursor) -> Column:
    lsn = f.col("commit_lsn")
    return (lsn > cursor.lsn) | ((lsn == cursor.lsn) & (f.col("commit_idx") >= cursor.idx))


def _is_of_this_host(destination: Destination) -> bool:
    """Whether it is a folder, or a catalog in the state database, that executors need not see."""
    if isinstance(destination, IcebergDestination) and destination.catalog.uri is None:
        return destination.path is not None or destination.catalog.type == "sql"
    if isinstance(destination, LakeDestination):
        return destination.path is not None
    if isinstance(destination, ParquetDestination) and destination.columns == "typed":
        return destination.path is not None
    return isinstance(destination, FileDestination)


def _mark(share: Share) -> Path | None:
    """A file in the directory of a Parquet sink, by which an executor knows that directory."""
    destination = share.consumer.destination
    if not isinstance(destination, ParquetDestination) or destination.columns == "typed":
        return None
    folder = Path(destination.root) / OWN_FOLDER
    mark = folder / f"driver-{share.run}"
    try:
        make_directories(folder)
        if not mark.exists():
            for old in folder.glob("driver-*"):
                old.unlink(missing_ok=True)
            mark.touch()
    except OSError as error:
        raise disk_error(folder.parent, error) from None
    return mark


def _deliver_part(
    share: Share,
    mark: Path | None,
    verdicts: Broadcast[bytes] | None,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """On an executor: one partition of a share. An error of ours comes back as itself."""
    schema = share.wanted.schema
    outcome: Outcome | WalbrookError | None = None
    if mark is None or mark.exists():
        try:
            with _verdicts_on_disk(share, verdicts) as judged:
                outcome = deliver_changes(judged, (batch.cast(schema) for batch in batches))
        except WalbrookError as error:
            outcome = error
    yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(outcome)])], ["outcome"])


@contextmanager
def _verdicts_on_disk(share: Share, verdicts: Broadcast[bytes] | None) -> Iterator[Share]:
    """The share with its verdicts in a file of this machine, removed afterwards."""
    if verdicts is None:
        yield share
        return
    with tempfile.NamedTemporaryFile(prefix="walbrook-") as file:  # readable by its owner alone
        file.write(verdicts.value)
        file.flush()
        yield replace(share, verdicts=file.name)
