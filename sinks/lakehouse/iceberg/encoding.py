"""Rows as Parquet files of an Iceberg table, with the metrics that let engines skip files. Pure.

Bounds come from the statistics that Parquet has anyway, as physical values, so that infinite dates
are no trouble. Invariant: a bound that is given holds for all rows of the file; a text is cut to
its first characters, the upper bound upwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sinks.lakehouse.iceberg import library as iceberg
from sinks.lakehouse.iceberg.schema import FIELD_ID

_ROW_GROUP_ROWS: Final = 131_072
_BOUND_LENGTH: Final = 16
_FORMAT_VERSION: Final = 2
_BOUNDED: Final = (
    iceberg.IntegerType,
    iceberg.LongType,
    iceberg.StringType,
    iceberg.DateType,
    iceberg.TimestampType,
    iceberg.TimestamptzType,
    iceberg.DecimalType,
)


@dataclass(frozen=True)
class EncodedFile:
    """A Parquet file, and what the table's metadata say of it."""

    data: memoryview
    metadata: pq.FileMetaData


def encode(rows: pa.Table, parquet: pa.Schema) -> EncodedFile:
    """The rows in the columns of ``parquet``, which they have in the same order."""
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, parquet, compression="zstd") as writer:
        writer.write_table(rows.cast(parquet), row_group_size=_ROW_GROUP_ROWS)
    return EncodedFile(
        memoryview(out.getvalue()), pq.read_metadata(pa.BufferReader(out.getvalue()))
    )


def partitions(rows: pa.Table, name: str | None) -> Iterator[tuple[object, pa.Table]]:
    """The rows of each value of a column of dates, in their order; all rows without a column."""
    if name is None:
        yield None, rows
        return
    encoded = rows.column(name).combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy()
    days = encoded.dictionary.cast(pa.int32()).to_pylist()
    for code, day in enumerate(days):
        yield day, rows if len(days) == 1 else rows.take(np.flatnonzero(codes == code))


def described(
    location: str,
    file: EncodedFile,
    schema: iceberg.Schema,
    partition: Sequence[object],
    equality_ids: Sequence[int] = (),
) -> iceberg.DataFile:
    """The entry of a file; with ``equality_ids`` it is one of deletes by these columns."""
    metrics = _metrics(file.metadata, schema)
    content = iceberg.DataFileContent.EQUALITY_DELETES
    described = iceberg.DataFile.from_args(
        _table_format_version=_FORMAT_VERSION,
        content=content if equality_ids else iceberg.DataFileContent.DATA,
        file_path=location,
        file_format=iceberg.FileFormat.PARQUET,
        partition=iceberg.Record(*partition),
        record_count=file.metadata.num_rows,
        file_size_in_bytes=len(file.data),
        column_sizes=metrics.sizes,
        value_counts=metrics.values,
        null_value_counts=metrics.nulls,
        nan_value_counts={},
        lower_bounds=metrics.lowest,
        upper_bounds=metrics.highest,
        key_metadata=None,
        split_offsets=_offsets(file.metadata),
        equality_ids=list(equality_ids) or None,
        sort_order_id=None,
    )
    described.spec_id = 0
    return described


def bounds_of(
    file: iceberg.DataFile, schema: iceberg.Schema
) -> Mapping[str, tuple[object, object]]:
    """Lowest and highest value of the columns that have integers or texts."""
    found: dict[str, tuple[object, object]] = {}
    for number, low in (file.lower_bounds or {}).items():
        high = (file.upper_bounds or {}).get(number)
        column = next((each for each in schema.fields if each.field_id == number), None)
        if column is None or high is None:
            continue
        kind = column.field_type
        if isinstance(kind, iceberg.LongType):
            # A column that was widened has bounds of four bytes in its older files.
            found[column.name] = (_integer(low), _integer(high))
        elif isinstance(kind, iceberg.IntegerType | iceberg.StringType):
            found[column.name] = (
                iceberg.from_bytes(kind, low),
                iceberg.from_bytes(kind, high),
            )
    return found


def by_number(rows: pa.Table) -> dict[int, pa.ChunkedArray]:
    """The columns of a file by their numbers."""
    return {
        int((each.metadata or {})[FIELD_ID]): rows.column(at)
        for at, each in enumerate(rows.schema)
        if FIELD_ID in (each.metadata or {})
    }


def _integer(bound: bytes) -> int:
    return int.from_bytes(bound, "little", signed=True)


@dataclass(frozen=True)
class _Metrics:
    sizes: dict[int, int]
    values: dict[int, int]
    nulls: dict[int, int]
    lowest: dict[int, bytes]
    highest: dict[int, bytes]


def _metrics(metadata: pq.FileMetaData, schema: iceberg.Schema) -> _Metrics:
    """Sizes and counts of the leading columns of each top-level column that is not nested."""
    columns = {each.name: each for each in schema.fields if each.field_type.is_primitive}
    metrics = _Metrics({}, {}, {}, {}, {})
    for at in range(metadata.num_columns):
        path = metadata.schema.column(at).path
        column = columns.get(path)
        if column is None or metadata.schema.column(at).max_repetition_level:
            continue
        chunks = [metadata.row_group(g).column(at) for g in range(metadata.num_row_groups)]
        number = column.field_id
        metrics.sizes[number] = sum(chunk.total_compressed_size for chunk in chunks)
        metrics.values[number] = sum(chunk.num_values for chunk in chunks)
        if not all(chunk.is_stats_set for chunk in chunks):
            continue
        stats = [chunk.statistics for chunk in chunks]
        if all(each.has_null_count for each in stats):
            metrics.nulls[number] = sum(each.null_count for each in stats)
        # A row group of nulls alone has no bounds, and takes none from the others.
        filled = [
            each for each, chunk in zip(stats, chunks, strict=True)
            if each.has_min_max or each.null_count != chunk.num_values
        ]  # fmt: skip
        kind = column.field_type
        if filled and isinstance(kind, _BOUNDED) and all(each.has_min_max for each in filled):
            low, high = _extremes(kind, [(each.min_raw, each.max_raw) for each in filled])
            metrics.lowest[number] = low
            if high is not None:
                metrics.highest[number] = high
    return metrics


def _extremes(
    kind: iceberg.IcebergType, bounds: Sequence[tuple[object, object]]
) -> tuple[bytes, bytes | None]:
    if isinstance(kind, iceberg.StringType):
        texts = [(_bytes(low).decode(), _bytes(high).decode()) for low, high in bounds]
        # UTF-8 sorts as its code points do.
        low, high = min(low for low, _ in texts), max(high for _, high in texts)
        upper: str | None = high
        if len(high) > _BOUND_LENGTH:
            upper = iceberg.truncate_upper_bound_text_string(high, _BOUND_LENGTH)
        return low[:_BOUND_LENGTH].encode(), None if upper is None else upper.encode()
    if isinstance(kind, iceberg.DecimalType):
        numbers = [(_unscaled(low), _unscaled(high)) for low, high in bounds]
        return _minimal(min(low for low, _ in numbers)), _minimal(max(high for _, high in numbers))
    lows, highs = ([int(str(pair[at])) for pair in bounds] for at in (0, 1))
    width = 4 if isinstance(kind, iceberg.IntegerType | iceberg.DateType) else 8
    return (
        min(lows).to_bytes(width, "little", signed=True),
        max(highs).to_bytes(width, "little", signed=True),
    )


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes)
    return value


def _unscaled(value: object) -> int:
    return int.from_bytes(_bytes(value), "big", signed=True)


def _minimal(number: int) -> bytes:
    """An unscaled decimal in as few bytes as hold it."""
    return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)


def _offsets(metadata: pq.FileMetaData) -> list[int]:
    starts = []
    for group in range(metadata.num_row_groups):
        first = metadata.row_group(group).column(0)
        dictionary = first.dictionary_page_offset if first.has_dictionary_page else None
        starts.append(first.data_page_offset if dictionary is None else dictionary)
    return sorted(starts)
