"""Groups, the unit of order: a number for each message that all of its group share. Pure.

A group is a row of a table, by its key, unless the consumer names other columns for that table.
Invariant: every process gives a group the same number, whatever else is in the batch.
Two groups may share a number, one time in 2^64: then one waits for the other, and nothing is lost.

Some messages have a place among all of their table: a truncate, a schema change, and one whose
group is unknown or is not the one it had before. What is no change of a row is for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.sink import SinkConfig
from cdc.decoding.columns import bytes_of, offsets_of
from cdc.decoding.joins import joined

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_OF_A_TABLE = pa.array(["truncate", "schema_change"])
_ALONE = pa.array(["gap", "watermark", "window"])


@dataclass(frozen=True)
class Grouping:
    """How a consumer's messages form groups."""

    by_group: bool = True  # false: every message is for itself
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by ``schema.table``

    @classmethod
    def of(cls, consumer: SinkConfig) -> Grouping:
        """As its configuration says."""
        named = {str(table.name): table.group_column_names for table in consumer.tables}
        return cls(consumer.message_grouping, named)


BY_KEY = Grouping()


@dataclass(frozen=True)
class Groups:
    """Of each row its group, null for none, and whether it has a place among all of its table."""

    ids: pa.Int64Array
    whole_table: pa.BooleanArray


def group_ids(rows: pa.RecordBatch, grouping: Grouping = BY_KEY) -> pa.Int64Array:
    """A number for each row that all rows of its group share; null: it belongs to none."""
    return _ids(rows, grouping)[0]


def groups_of(rows: pa.RecordBatch, grouping: Grouping = BY_KEY) -> Groups:
    """The groups of rows that have at least the columns of MESSAGE_SCHEMA."""
    ids, unsure = _ids(rows, grouping)
    if not grouping.by_group:
        return Groups(ids, unsure)
    of_a_table = pc.is_in(rows.column("action"), value_set=_OF_A_TABLE)
    key_changed = rows.column("old_record_pks").is_valid()
    return Groups(ids, pc.or_(pc.or_(of_a_table, key_changed), unsure))


def _ids(rows: pa.RecordBatch, grouping: Grouping) -> tuple[pa.Int64Array, pa.BooleanArray]:
    """The groups, and which of them are not sure."""
    count = rows.num_rows
    sure = pa.repeat(pa.scalar(False), count)
    if not grouping.by_group:
        return pa.nulls(count, pa.int64()), sure
    keys, unsure = rows.column("record_pks"), sure
    if grouping.columns:
        keys, unsure = _configured(rows, keys, grouping.columns)
    texts = joined(rows.column("table_schema"), "\n", rows.column("table_name"), "\n", keys)
    ids = pa.array(text_hashes(texts).view(np.int64))
    alone = pc.is_in(rows.column("action"), value_set=_ALONE)
    if alone.true_count:
        ids = pc.if_else(alone, pa.scalar(None, pa.int64()), ids)
    return ids, unsure


def message_keys(rows: pa.RecordBatch, keys: pa.StringArray, grouping: Grouping) -> pa.StringArray:
    """Of each row a key that all rows of its group share; null: it belongs to none.

    ``keys`` are those of rows that are grouped by their primary key.
    """
    nothing = pa.scalar(None, pa.string())
    if not grouping.by_group:
        return pa.nulls(rows.num_rows, pa.string())
    if grouping.columns:
        keys, _ = _configured(rows, keys, grouping.columns)
    alone = pc.is_in(rows.column("action"), value_set=_ALONE)
    return pc.if_else(alone, nothing, keys) if alone.true_count else keys


def text_hashes(texts: pa.StringArray) -> npt.NDArray[np.uint64]:
    """A well mixed number for each text; none is empty or null."""
    bounds = offsets_of(texts).astype(np.int64)
    if len(bounds) < 2:
        return np.empty(0, dtype=np.uint64)
    bounds -= bounds[0]
    lengths = np.diff(bounds)
    # A polynomial over the bytes of each text, all texts at once.
    places = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    weights = np.cumprod(np.full(int(lengths.max()), _ODD, dtype=np.uint64))
    sums = np.add.reduceat(bytes_of(texts).astype(np.uint64) * weights[places], bounds[:-1])
    return _mixed(sums + lengths.astype(np.uint64))


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the result hangs on every bit given: splitmix64's last steps."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    return mixed ^ (mixed >> np.uint64(31))


def _configured(
    rows: pa.RecordBatch, keys: pa.StringArray, columns: Mapping[str, tuple[str, ...]]
) -> tuple[pa.StringArray, pa.BooleanArray]:
    """The keys, those of some tables by other columns, and which rows' groups are not sure.

    Their values stand in the JSON of the record, so each such row is parsed: a price that only
    consumers pay who ask for it, and for those tables alone.
    """
    tables = joined(rows.column("table_schema"), ".", rows.column("table_name"))
    asked = pc.is_in(tables, value_set=pa.array(list(columns), pa.string()))
    places = np.flatnonzero(asked.to_numpy(zero_copy_only=False))
    unsure = np.zeros(rows.num_rows, dtype=bool)
    if not len(places):
        return keys, pa.array(unsure)
    some = rows.take(pa.array(places))
    found: list[str] = []
    for place, table, action, record, changes in zip(
        places,
        tables.take(pa.array(places)).to_pylist(),
        some.column("action").to_pylist(),
        some.column("record").to_pylist(),
        some.column("changes").to_pylist(),
        strict=True,
    ):
        names = columns[table]
        values = _object(record)
        old = _object(changes)
        # A delete has null for what the source did not say of the old row.
        known = values if action != "delete" else {k: v for k, v in values.items() if v is not None}
        unsure[place] = any(name not in known or name in old for name in names)
        found.append(orjson.dumps([values.get(name) for name in names]).decode())
    mask = np.zeros(rows.num_rows, dtype=bool)
    mask[places] = True
    return pc.replace_with_mask(keys, pa.array(mask), pa.array(found)), pa.array(unsure)


def _object(text: str | None) -> dict[str, object]:
    value = {} if text is None else orjson.loads(text)
    return value if isinstance(value, dict) else {}
