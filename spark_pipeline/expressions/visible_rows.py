"""What an expression sees of a change: ``record``, ``changes``, ``action`` and ``metadata``.

Rows come by table version, for each has columns of its own. Invariant: the rows are exactly the
inserts, updates, deletes and reads that the consumer takes, in the order of the raw rows, but for
messages that break the protocol; one whose values have no typed form says so in ``error``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.bisection import bisect
from cdc.change import READ
from cdc.config import SinkConfig
from cdc.cursor import ORIGIN, Cursor
from cdc.cursor_columns import prefix_below
from cdc.decoding.isolate import BAD_MAX
from cdc.decoding.joins import joined
from cdc.decoding.plan import TablePlan, plan_for
from cdc.decoding.typed import decode_tables, table_type
from cdc.errors import DecodeError, ProtocolError
from spark_pipeline.delivery.matching import Match
from spark_pipeline.slices.raw_rows import RawRows

if TYPE_CHECKING:
    from spark_pipeline.delivery.deliver import Origin

_KINDS: Final = {"insert": ord("I"), "update": ord("U"), "delete": ord("D"), READ: ord("R")}
_NAMES = pa.list_(pa.string())
_METADATA: Final = pa.struct(
    [
        pa.field("table_schema", pa.string()),
        pa.field("table_name", pa.string()),
        pa.field("commit_timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("commit_lsn", pa.int64()),
        pa.field("commit_idx", pa.int64()),
        pa.field("xid", pa.int64()),
        pa.field("idempotency_key", pa.string()),
        pa.field("record_pks", _NAMES),
        pa.field("transaction_annotations", pa.string()),
        pa.field("unchanged", _NAMES),
        pa.field("changed", _NAMES),
        pa.field("database_name", pa.string()),
        pa.field("consumer", pa.struct([pa.field("name", pa.string())])),
        pa.field(
            "database",
            pa.struct([pa.field(name, pa.string()) for name in ("name", "database", "hostname")]),
        ),
    ]
)


@dataclass(frozen=True)
class VisibleRows:
    """The rows of one table version that a consumer takes."""

    schema: bytes  # the Relation message, as the log keeps it
    cursors: pa.RecordBatch  # commit_lsn, commit_idx
    rows: pa.RecordBatch  # of ``seen_schema``
    error: pa.StringArray  # why a row has no typed form; null for most


def seen_schema(plan: TablePlan) -> pa.Schema:
    """The columns that expressions see of a table version."""
    return schema_over(table_type(plan))


def schema_over(row: pa.StructType) -> pa.Schema:
    """What expressions see where these are the columns of a row."""
    return pa.schema(
        [
            pa.field("record", row),
            pa.field("changes", row),
            pa.field("action", pa.string(), nullable=False),
            pa.field("metadata", _METADATA, nullable=False),
        ]
    )


def place_of(rows: pa.RecordBatch, at: int) -> str:
    """What a row that expressions see is called in errors."""
    said = rows.column("metadata")[at].as_py()
    cursor = Cursor(said["commit_lsn"], said["commit_idx"])
    return f"the change at {cursor} of table {said['table_schema']}.{said['table_name']}"


def met_versions(
    consumer: SinkConfig, rows: RawRows, since: Cursor = ORIGIN, until: Cursor | None = None
) -> dict[int, tuple[bytes, NDArray[np.int64]]]:
    """The table versions, by schema id, of the rows that a consumer takes, and where these are."""
    kind, schema_id = (rows.raw.column(name).to_numpy() for name in ("kind", "schema_id"))
    wanted = np.isin(
        kind, [_KINDS[action] for action in (*consumer.actions, READ) if action in _KINDS]
    )
    wanted[: prefix_below(rows.raw, since)] = False
    if until is not None:
        wanted[prefix_below(rows.raw, until) :] = False
    present = set(np.unique(schema_id[wanted]).tolist())
    lost = present - rows.schemas.keys()
    if lost:
        raise ProtocolError(
            f"raw rows came without their schemas {sorted(lost)}",
            fix="hand over the schemas of every frame that the rows are from",
        )
    taken = _taken(consumer, {known: rows.schemas[known] for known in present})
    return {
        known: (message, np.flatnonzero(wanted & (schema_id == known)))
        for known, message in taken.items()
    }


def _taken(consumer: SinkConfig, schemas: Mapping[int, bytes]) -> dict[int, bytes]:
    """Those of the tables that a consumer takes."""
    match = Match.of(consumer)
    relations = {known: plan_for(message).relation for known, message in schemas.items()}
    return {
        known: schemas[known]
        for known, relation in relations.items()
        if match.takes(relation.namespace, relation.name)
    }


def seen_rows(
    consumer: SinkConfig,
    origin: Origin,
    rows: RawRows,
    *,
    since: Cursor = ORIGIN,
    until: Cursor | None = None,
    only: int | None = None,
) -> Iterator[VisibleRows]:
    """The rows from ``since`` up to ``until`` by table version, or those of the schema ``only``."""
    for known, (message, places) in met_versions(consumer, rows, since, until).items():
        if only is not None and known != only:
            continue
        for typed, at in _decoded(rows.raw, places, known, message):
            said = rows.annotations.take(pa.array(at)) if rows.annotations is not None else None
            yield _seen(message, typed, said, consumer, origin)


def _decoded(
    raw: pa.RecordBatch, rows: NDArray[np.int64], schema_id: int, message: bytes
) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
    """Typed rows of one table version with their places; most often all of them at once.

    A message that breaks the protocol is found by bisection and left out: it is an error of
    decode wherever it comes, so no expression is asked about it.
    """
    bad = 0

    def attempt(start: int, stop: int) -> pa.RecordBatch:
        some = raw.take(pa.array(rows[start:stop]))
        (table,) = decode_tables(some, {schema_id: message}, compared=True)
        return table.rows

    for start, stop, result in bisect(len(rows), attempt, DecodeError):
        if not isinstance(result, DecodeError):
            yield result, rows[start:stop]
            continue
        bad += 1
        if bad > BAD_MAX:
            raise result


def _seen(
    message: bytes,
    typed: pa.RecordBatch,
    annotations: pa.StringArray | None,
    consumer: SinkConfig,
    origin: Origin,
) -> VisibleRows:
    plan = plan_for(message)
    schema = seen_schema(plan)
    columns = [
        typed.column("record"),
        typed.column("changes"),
        typed.column("action"),
        _metadata(plan, typed, annotations, consumer, origin),
    ]
    return VisibleRows(
        message,
        typed.select(["commit_lsn", "commit_idx"]),
        pa.RecordBatch.from_arrays(columns, schema=schema),
        typed.column("error"),
    )


def _metadata(
    plan: TablePlan,
    typed: pa.RecordBatch,
    annotations: pa.StringArray | None,
    consumer: SinkConfig,
    origin: Origin,
) -> pa.StructArray:
    count = typed.num_rows

    def constant(text: str) -> pa.StringArray:
        return pa.repeat(pa.scalar(text, pa.string()), count)

    lsn, idx = (typed.column(name).cast(pa.string()) for name in ("commit_lsn", "commit_idx"))
    database = [constant(f"{origin.name}:")] if len(consumer.sources) > 1 else []
    known = {
        "table_schema": constant(plan.relation.namespace),
        "table_name": constant(plan.relation.name),
        "idempotency_key": joined(*database, lsn, ":", idx),
        "transaction_annotations": pa.nulls(count, pa.string())
        if annotations is None
        else annotations,
        "database_name": constant(origin.name),
        "consumer": _struct_of("consumer", [constant(consumer.name)]),
        "database": _struct_of(
            "database", [constant(o) for o in (origin.name, origin.database, origin.hostname)]
        ),
    }
    arrays = [known[f.name] if f.name in known else typed.column(f.name) for f in _METADATA]
    return pa.StructArray.from_arrays(arrays, fields=list(_METADATA))


def _struct_of(name: str, arrays: list[pa.Array]) -> pa.StructArray:
    return pa.StructArray.from_arrays(arrays, fields=list(_METADATA.field(name).type))
