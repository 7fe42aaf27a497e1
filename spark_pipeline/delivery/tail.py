"""The tail of a source's log as one sink would get it, as a process:
``python -m spark_pipeline.delivery.tail CONFIG SINK …``. ``walbrook tail`` becomes it.

Changes are matched, decoded and shaped by the same code as for delivery, batch after batch, so
memory is bounded by a batch. Nothing is delivered, settled or written. SQL and Python expressions
of the sink are not evaluated: what they leave out or change is said once on standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.conninfo import conninfo_to_dict

from cdc.config import Config, SinkConfig, load
from cdc.config.table import TableName
from cdc.cursor import Cursor
from cdc.decoding.annotations import annotations_of
from cdc.decoding.isolate import decode_carefully
from cdc.errors import OperatorError, WalbrookError
from cdc.log.frame import Frame
from cdc.log.open import open_log
from cdc.log.view import LogReader
from cdc.trace.change import RowKey, read_any_cursor
from spark_pipeline.delivery.deliver import Origin, shape_of
from spark_pipeline.delivery.matching import Match
from spark_pipeline.delivery.value_formats import view_of, wanted_by

_WAIT_S = 1.0


@dataclass(frozen=True)
class Chosen:
    """Which of the sink's changes are shown; empty means all."""

    tables: Sequence[str] = ()
    actions: Sequence[str] = ()
    key: RowKey | None = None

    def of(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that are shown, whole columns at a time."""
        keep = changes.column("error").is_null()
        if self.tables or self.key is not None:
            names = (changes.column("table_schema"), changes.column("table_name"))
            table = pc.binary_join_element_wise(*names, ".")
            if self.tables:
                keep = pc.and_(keep, pc.is_in(table, pa.array(self.tables, pa.string())))
            if self.key is not None:
                pks = pc.equal(changes.column("record_pks"), self.key.pks)
                keep = pc.and_(keep, pc.and_(pc.equal(table, self.key.table), pks))
        if self.actions:
            action = changes.column("action")
            keep = pc.and_(keep, pc.is_in(action, pa.array(self.actions, pa.string())))
        return changes.filter(keep)


class SinkTail:
    """Follows a log for one sink."""

    def __init__(self, config: Config, sink: SinkConfig, source: str, chosen: Chosen) -> None:
        parameters = conninfo_to_dict(config.database(source).dsn())
        origin = Origin(source, str(parameters.get("host", "")), str(parameters.get("dbname", "")))
        self._sink = sink
        self._shape = shape_of(sink, origin)
        self._match = Match.of(sink)
        self._wanted = wanted_by([sink])
        self._chosen = chosen

    def lines(self, log: LogReader, start: Cursor | None, *, follow: bool) -> Iterator[bytes]:
        """One JSON object per change from ``start`` on; without it, what comes from now on."""
        batch = log.next_batch() if start is None else max(log.seek(start), log.first_batch())
        end = log.next_batch()
        while True:
            while batch < end:
                (frame,) = log.frames(batch, batch + 1)
                yield from self._of(frame, start)
                batch += 1
            if not follow:
                return
            end = log.wait(end, _WAIT_S)

    def _of(self, frame: Frame, start: Cursor | None) -> Iterator[bytes]:
        raw = frame.raw
        if not raw.num_rows:
            return
        texts = annotations_of(frame.annotations, raw.num_rows)
        decoded = decode_carefully(raw, frame.schemas, annotations=texts, wanted=self._wanted)
        taken = self._match.select(view_of(decoded, self._wanted, self._sink))
        rows = self._shape.rows(self._chosen.of(taken))
        if not rows.num_rows:
            return
        messages = self._shape.messages(rows, "").to_pylist()
        names = ("commit_lsn", "commit_idx", "table_schema", "table_name", "action")
        for row, message in zip(rows.select(names).to_pylist(), messages, strict=True):
            cursor = Cursor(row["commit_lsn"], row["commit_idx"])
            if start is not None and cursor < start:
                continue
            table = f"{row['table_schema']}.{row['table_name']}" if row["table_name"] else None
            yield orjson.dumps(
                {
                    "cursor": str(cursor),
                    "table": table,
                    "action": row["action"],
                    "message": orjson.Fragment(message),
                },
                option=orjson.OPT_APPEND_NEWLINE,
            )


def main() -> int:
    given = _arguments()
    try:
        config = load(given.config)
        sink = _sink(config, given.sink)
        source = given.source or sink.sources[0]
        key = None if given.key is None else RowKey.parse(given.key)
        chosen = Chosen([str(TableName.parse(each)) for each in given.table], given.action, key)
        if sink.expressions:
            listed = ", ".join(sink.expressions)
            print(f"walbrook: not evaluated, as it may need Spark: {listed}", file=sys.stderr)
        start = None if given.start is None else read_any_cursor(given.start)
        with closing(open_log(config.log.directory / source)) as log:
            tail = SinkTail(config, sink, source, chosen)
            for line in islice(tail.lines(log, start, follow=not given.ends), given.limit):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
    except WalbrookError as error:
        print(f"walbrook: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _sink(config: Config, name: str) -> SinkConfig:
    for sink in config.sinks:
        if sink.name == name:
            return sink
    raise OperatorError(
        f"there is no sink {name}",
        fix=f"name one of {', '.join(sink.name for sink in config.sinks)}",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spark_pipeline.delivery.tail")
    parser.add_argument("config", type=Path)
    parser.add_argument("sink")
    parser.add_argument("--source")
    parser.add_argument("--table", action="append", default=[])
    parser.add_argument("--action", action="append", default=[])
    parser.add_argument("--key")
    parser.add_argument("--from", dest="start")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--ends", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
