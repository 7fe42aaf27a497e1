"""Changes as a window's expressions see them, made of what decode wrote.

A buffered change is JSON text; here it becomes typed columns again, but only those that an
expression looks at. Invariant: a row with a value that its type cannot have is named
with the reason, and the others do not suffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.decoding.joins import joined
from cdc.decoding.json_members import members, pairs
from cdc.decoding.json_values import typed_values
from cdc.decoding.rows import Faults
from spark_pipeline.eventtime.windows.tables import WindowTables

if TYPE_CHECKING:
    from spark_pipeline.delivery.deliver import Origin

_NAMES = pa.list_(pa.string())


@dataclass
class WindowRows:
    """Rows of one consumer on their way to typed columns; ``sources`` are places in ``origins``."""

    rows: pa.RecordBatch
    sources: NDArray[np.int16]
    tables: WindowTables
    consumer: str
    origins: Sequence[Origin]
    faults: Faults = field(default_factory=Faults)

    def seen(self, used: pa.Schema) -> pa.RecordBatch:
        """The columns ``used``; rows in ``faults`` have nulls in place of what is wrong."""
        of: dict[str, Callable[[pa.StructType], pa.Array]] = {
            "record": partial(self._row, "record"),
            "changes": partial(self._row, "changes"),
            "action": lambda _: self.rows.column("action"),
            "metadata": self._metadata,
        }
        return pa.RecordBatch.from_arrays([of[one.name](one.type) for one in used], schema=used)

    @property
    def bad(self) -> dict[int, str]:
        """The rows that cannot be read, and why."""
        return {
            row: f"column {column}: {what}" for row, (column, what) in self.faults.by_row.items()
        }

    def _row(self, which: str, wanted: pa.StructType) -> pa.StructArray:
        objects = self.rows.column(which).cast(pa.binary())
        if not wanted.num_fields:
            return pa.array([{}] * len(objects), wanted)
        names = [orjson.dumps(one.name) for one in wanted]
        arrays = []
        for one, texts in zip(wanted, members(objects, names), strict=True):
            read = partial(
                typed_values, wanted=one.type, json=self.tables.columns[one.name].is_json
            )
            name = one.name if which == "record" else f"{which}.{one.name}"
            arrays.append(self.faults.sound(name, texts, read))
        return pa.StructArray.from_arrays(arrays, fields=list(wanted), mask=objects.is_null())

    def _metadata(self, wanted: pa.StructType) -> pa.StructArray:
        arrays = [self._field(one) for one in wanted]
        return pa.StructArray.from_arrays(arrays, fields=list(wanted))

    def _field(self, wanted: pa.Field) -> pa.Array:
        made: dict[str, Callable[[], pa.Array]] = {
            "idempotency_key": self._keys,
            "record_pks": lambda: self._names("record_pks"),
            "unchanged": lambda: self._names("unchanged"),
            "changed": self._changed,
            "transaction_annotations": lambda: self.rows.column("annotations"),
            "database_name": lambda: self._of_origin("name"),
            "consumer": lambda: self._struct(
                wanted.type, [pa.repeat(pa.scalar(self.consumer), self.rows.num_rows)]
            ),
            "database": lambda: self._struct(
                wanted.type, [self._of_origin(one.name) for one in wanted.type]
            ),
        }
        return made[wanted.name]() if wanted.name in made else self.rows.column(wanted.name)

    def _struct(self, wanted: pa.StructType, arrays: list[pa.Array]) -> pa.StructArray:
        return pa.StructArray.from_arrays(arrays, fields=list(wanted))

    def _keys(self) -> pa.StringArray:
        lsn, idx = (
            self.rows.column(name).cast(pa.string()) for name in ("commit_lsn", "commit_idx")
        )
        database = [self._of_origin("name"), ":"] if len(self.origins) > 1 else []
        return joined(*database, lsn, ":", idx)

    def _names(self, column: str) -> pa.ListArray:
        return typed_values(self.rows.column(column).cast(pa.binary()), _NAMES)

    def _changed(self) -> pa.ListArray:
        """Null also for an update that changed nothing: its JSON says no more than one without an
        old row."""
        changes = self.rows.column("changes").cast(pa.binary())
        bounds, keys, _ = pairs(changes)
        lists = pa.ListArray.from_arrays(
            pa.array(bounds, pa.int32()), typed_values(keys, pa.string())
        )
        some = np.diff(bounds) > 0
        return pc.if_else(pa.array(some), lists, pa.scalar(None, _NAMES))

    def _of_origin(self, name: str) -> pa.StringArray:
        known = pa.array([getattr(origin, name) for origin in self.origins], pa.string())
        return known.take(pa.array(self.sources))
