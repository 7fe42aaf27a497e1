"""The columns of an Iceberg table as Arrow fields, and which column keeps its number. Pure.

Iceberg knows a column by its number, never by its place or name. Fields in Arrow carry that number
as Parquet does (``PARQUET:field_id``). Iceberg has no 16-bit integers and no metadata of columns:
``Columns`` holds both beside the schema, as a property of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import orjson
import pyarrow as pa

from sinks.lakehouse.iceberg import library as iceberg

FIELD_ID: Final = b"PARQUET:field_id"

_PRIMITIVES: Final[tuple[tuple[pa.DataType, iceberg.PrimitiveType], ...]] = (
    (pa.bool_(), iceberg.BooleanType()),
    (pa.int32(), iceberg.IntegerType()),
    (pa.int64(), iceberg.LongType()),
    (pa.float32(), iceberg.FloatType()),
    (pa.float64(), iceberg.DoubleType()),
    (pa.string(), iceberg.StringType()),
    (pa.binary(), iceberg.BinaryType()),
    (pa.date32(), iceberg.DateType()),
    (pa.timestamp("us"), iceberg.TimestampType()),
    (pa.timestamp("us", tz="UTC"), iceberg.TimestamptzType()),
    (pa.int16(), iceberg.IntegerType()),  # the last one: integers are read as 32 bits
)
_PROMOTIONS: Final = frozenset(
    {
        (iceberg.IntegerType(), iceberg.LongType()),
        (iceberg.FloatType(), iceberg.DoubleType()),
    }
)
_OWN_KEY: Final = "walbrook."


@dataclass(frozen=True)
class Columns:
    """What a table's schema cannot say: metadata of columns, and which integers have 16 bits."""

    metadata: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    small: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        said = orjson.loads(text)
        return cls(
            {int(number): each for number, each in said["metadata"].items()},
            frozenset(said["small"]),
        )

    def __str__(self) -> str:
        metadata = {str(number): dict(each) for number, each in self.metadata.items()}
        return orjson.dumps({"metadata": metadata, "small": sorted(self.small)}).decode()


@dataclass(frozen=True)
class Layout:
    """The columns of a table as Iceberg has them."""

    schema: iceberg.Schema
    columns: Columns

    def arrow(self) -> pa.Schema:
        """The columns in the types that the source gave them."""
        return pa.schema([_arrow_field(each, self.columns) for each in self.schema.fields])

    def parquet(self) -> pa.Schema:
        """The columns as files have them: with their numbers, and in types of Iceberg."""
        return pa.schema([_arrow_field(each, None) for each in self.schema.fields])


def planned(
    wanted: pa.Schema,
    was: Sequence[str | None],
    current: Layout | None,
    last_id: int = 0,
    schema_id: int = 0,
) -> Layout:
    """The columns of a table that is to be created or altered.

    ``was`` names for each column the one of ``current`` that it goes on. It keeps that number if
    Iceberg can read the old files in the new type, else it is a new column. The same arguments
    always give the same numbers.
    """
    ids = _Ids(last_id)
    kept = [
        None if current is None or name is None else _kept(each, current.schema.find_field(name))
        for each, name in zip(wanted, was, strict=True)
    ]
    numbers = [ids.next() if old is None else old.field_id for old in kept]
    metadata: dict[int, Mapping[str, str]] = {}
    fields = []
    for each, old, number in zip(wanted, kept, numbers, strict=True):
        said = {
            key.decode(): value.decode()
            for key, value in (each.metadata or {}).items()
            if key.decode().startswith(_OWN_KEY)
        }
        if said:
            metadata[number] = said
        reused = None if old is None or old.field_type.is_primitive else old.field_type
        kind = reused or _iceberg_type(each.type, ids.next)
        fields.append(iceberg.NestedField(number, each.name, kind, required=False))
    columns = Columns(metadata, _small_ids(wanted, fields))
    return Layout(iceberg.Schema(*fields, schema_id=schema_id), columns)


def can_keep_files(current: Layout, wanted: pa.Schema, was: Sequence[str | None]) -> bool:
    """Whether all old files can be read in the new columns."""
    return all(
        name is None or _kept(each, current.schema.find_field(name)) is not None
        for each, name in zip(wanted, was, strict=True)
    )


class _Ids:
    def __init__(self, last: int) -> None:
        self.last = last

    def next(self) -> int:
        self.last += 1
        return self.last


def _kept(new: pa.Field, old: iceberg.NestedField) -> iceberg.NestedField | None:
    """The old column, if its files can be read in the new type."""
    before = old.field_type
    after = _iceberg_type(new.type, lambda: 0)
    if not before.is_primitive or not after.is_primitive:
        same = _arrow_type(before, None, 0) == _arrow_type(after, None, 0)
        return old if same else None
    if before == after or (before, after) in _PROMOTIONS:
        return old
    if isinstance(before, iceberg.DecimalType) and isinstance(after, iceberg.DecimalType):
        grows = before.scale == after.scale and before.precision <= after.precision
        return old if grows else None
    return None


def _iceberg_type(kind: pa.DataType, next_id: Callable[[], int]) -> iceberg.IcebergType:
    """The type with new numbers for what is inside of it, those of one level before the next."""
    if pa.types.is_struct(kind):
        numbers = [next_id() for _ in kind]
        return iceberg.StructType(
            *[
                iceberg.NestedField(number, each.name, _iceberg_type(each.type, next_id))
                for number, each in zip(numbers, kind, strict=True)
            ]
        )
    if pa.types.is_map(kind):
        key, value = next_id(), next_id()
        return iceberg.MapType(
            key,
            _iceberg_type(kind.key_type, next_id),
            value,
            _iceberg_type(kind.item_type, next_id),
            value_required=False,
        )
    if pa.types.is_list(kind):
        element = next_id()
        inner = _iceberg_type(kind.value_type, next_id)
        return iceberg.ListType(element, inner, element_required=False)
    if pa.types.is_decimal(kind):
        return iceberg.DecimalType(kind.precision, kind.scale)
    return next(found for arrow, found in _PRIMITIVES if arrow == kind)


def _arrow_field(column: iceberg.NestedField, columns: Columns | None) -> pa.Field:
    """The field; for files if there are no ``columns``."""
    small = None if columns is None else columns.small
    kind = _arrow_type(column.field_type, small, column.field_id)
    if columns is None:
        return pa.field(column.name, kind, metadata=_numbered(column.field_id))
    said = columns.metadata.get(column.field_id)
    return pa.field(column.name, kind, metadata=dict(said) if said else None)


def _arrow_type(
    kind: iceberg.IcebergType, small: frozenset[int] | None, number: int
) -> pa.DataType:
    """The type; inner fields have their numbers in files, where ``small`` is None."""

    def inner(name: str, each: iceberg.IcebergType, of: int, *, nullable: bool = True) -> pa.Field:
        metadata = _numbered(of) if small is None and of else None
        return pa.field(name, _arrow_type(each, small, of), nullable, metadata)

    match kind:
        case iceberg.StructType():
            return pa.struct([inner(f.name, f.field_type, f.field_id) for f in kind.fields])
        case iceberg.ListType():
            return pa.list_(inner("item", kind.element_type, kind.element_id))
        case iceberg.MapType():
            key = inner("key", kind.key_type, kind.key_id, nullable=False)
            return pa.map_(key, inner("value", kind.value_type, kind.value_id))
        case iceberg.DecimalType():
            return pa.decimal128(kind.precision, kind.scale)
        case iceberg.IntegerType() if small is not None and number in small:
            return pa.int16()
        case _:
            return next(arrow for arrow, found in _PRIMITIVES if found == kind)


def _numbered(number: int) -> dict[bytes, bytes]:
    return {FIELD_ID: str(number).encode()}


def _small_ids(wanted: pa.Schema, fields: Sequence[iceberg.NestedField]) -> frozenset[int]:
    found: set[int] = set()

    def look(kind: pa.DataType, column: iceberg.IcebergType, number: int) -> None:
        if kind == pa.int16():
            found.add(number)
        match column:
            case iceberg.StructType():
                for each, at in zip(column.fields, kind, strict=True):
                    look(at.type, each.field_type, each.field_id)
            case iceberg.ListType():
                look(kind.value_type, column.element_type, column.element_id)
            case iceberg.MapType():
                look(kind.key_type, column.key_type, column.key_id)
                look(kind.item_type, column.value_type, column.value_id)
            case _:
                pass

    for each, column in zip(wanted, fields, strict=True):
        look(each.type, column.field_type, column.field_id)
    return frozenset(found)
