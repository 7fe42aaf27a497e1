"""One table of the log with typed columns: finding its newest version, reading rows of them all.

A table is known by the name it had when a change was made, as for consumers. Invariant:
every insert, update, delete and truncate of that name is a row, in one schema whatever the version
it was written in; a row that does not fit it says so in ``error`` and has no record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type
from pyspark.sql.types import StructType

from cdc.cursor import Cursor
from cdc.decoding.groups import ACTIONS
from cdc.decoding.joins import repeated
from cdc.decoding.lossless_cast import Mask, conform_row
from cdc.decoding.plan import TablePlan, plan_for
from cdc.decoding.relation import Relation
from cdc.decoding.typed import decode_tables, table_schema
from cdc.errors import ConfigError
from cdc.log.frame import Frame
from cdc.log.view import LogReader

TableName = tuple[str, str]
_STEP_MAX = 1_024
_ROWS = ("record", "before")
_TRUNCATE = "T"
_FIXED = table_schema(TablePlan(Relation(0, "", "", "d", (), ()), (), (), (), ()))


def spark_schema(version: TablePlan) -> StructType:
    """The columns of a table's typed rows; the metadata of ``record`` names the key's columns."""
    columns = from_arrow_schema(table_schema(version))
    columns["record"].metadata = {"keys": [version.names[at] for at in version.relation.key]}
    return columns


def newest_version(view: LogReader, path: str, table: TableName) -> TablePlan:
    """The newest version of a table in the log, searched from its end."""
    end, step = view.next_batch(), 1
    seen: set[str] = set()
    while end > (first := view.first_batch()):
        start = max(first, end - step)
        found: TablePlan | None = None
        for frame in view.frames(start, end):
            found = _newest_in(frame, table) or found
            seen |= {str(plan_for(message).relation) for message in frame.schemas.values()}
        if found is not None:
            return found
        end, step = start, min(2 * step, _STEP_MAX)
    name = ".".join(table)
    near = get_close_matches(name, seen, n=1)
    raise ConfigError(
        f"there is no change of table {name} in the log at {path}",
        fix=(f"write {near[0]}; or " if near else "")
        + "see that the publication has the table and change a row of it, or say the columns with "
        ".schema(...)",
    )


def _newest_in(frame: Frame, table: TableName) -> TablePlan | None:
    """The version of the table's last row in a frame."""
    ids = _versions(frame.schemas, table)
    if not ids:
        return None
    rows = np.flatnonzero(np.isin(frame.raw.column("schema_id").to_numpy(), list(ids)))
    if not len(rows):
        return None
    return plan_for(frame.schemas[frame.raw.column("schema_id")[int(rows[-1])].as_py()])


def _versions(schemas: Mapping[int, bytes], table: TableName) -> set[int]:
    plans = ((schema_id, plan_for(message)) for schema_id, message in schemas.items())
    return {
        schema_id
        for schema_id, plan in plans
        if (plan.relation.namespace, plan.relation.name) == table
    }


def check_schema(given: pa.Schema) -> None:
    """Refuse columns that are not those of a table's typed rows; ``record`` may have any."""
    usable = given.names == _FIXED.names and all(
        pa.types.is_struct(found) and found.num_fields and all(one.nullable for one in found)
        if name in _ROWS
        else found == _FIXED.field(name).type
        for name, found in zip(given.names, given.types, strict=True)
    )
    if not usable or len({given.field(name).type for name in _ROWS}) > 1:
        columns = [
            f"{name} {from_arrow_type(_FIXED.field(name).type).simpleString()}"
            for name in _FIXED.names
            if name not in _ROWS
        ]
        raise ConfigError(
            "the schema given is not one of a table's typed rows",
            fix=f"give the columns {', '.join(_FIXED.names)}, where record and before are the same "
            f"struct of nullable columns, and the others {', '.join(columns)}",
        )


class TableReader:
    """The rows of one table in the columns of ``schema``."""

    def __init__(self, table: TableName, schema: pa.Schema) -> None:
        self._table = table
        self._schema = schema

    def select(self, raw: pa.RecordBatch, schemas: Mapping[int, bytes]) -> pa.RecordBatch:
        """The rows of a frame that are this table's."""
        ids = _versions(schemas, self._table)
        if not ids:
            return raw.slice(0, 0)
        return raw.filter(pc.is_in(raw.column("schema_id"), pa.array(sorted(ids), pa.uint64())))

    def decode(self, raw: pa.RecordBatch, schemas: Mapping[int, bytes]) -> Iterator[pa.RecordBatch]:
        """Selected rows with typed columns, a batch for each version."""
        for table in decode_tables(raw, schemas):
            yield self._conformed(table.relation, table.rows)
        truncates = raw.filter(pc.equal(raw.column("kind"), ord(_TRUNCATE)))
        if truncates.num_rows:
            yield self._without_record(truncates)

    def _conformed(self, relation: Relation, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: rows.column(name) for name in rows.schema.names}
        target = self._schema.field("record").type
        faults: dict[str, Mask] = {}
        for name in _ROWS:
            columns[name], found = conform_row(rows.column(name), target)
            for column, bad in found.items():
                faults[column] = faults.get(column, np.zeros(len(bad), bool)) | bad
        if faults:
            columns["error"] = self._errors(relation, rows, faults)
            sound = columns["error"].is_null()
            for name in (*_ROWS, "unchanged"):
                none = pa.scalar(None, columns[name].type)
                columns[name] = pc.if_else(sound, columns[name], none)
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in self._schema.names], schema=self._schema
        )

    def _without_record(self, truncates: pa.RecordBatch) -> pa.RecordBatch:
        """What there is to say of a truncate: when it happened."""
        count = truncates.num_rows
        columns = {name: truncates.column(name) for name in ("commit_lsn", "commit_idx", "xid")}
        columns["commit_timestamp"] = truncates.column("commit_ts").view(pa.timestamp("us", "UTC"))
        columns["action"] = repeated(ACTIONS[_TRUNCATE], count)
        return pa.RecordBatch.from_arrays(
            [columns.get(field.name, pa.nulls(count, field.type)) for field in self._schema],
            schema=self._schema,
        )

    def _errors(
        self, relation: Relation, rows: pa.RecordBatch, faults: Mapping[str, Mask]
    ) -> pa.StringArray:
        """Why rows have no record: what decode said, else the first column that does not fit."""
        texts = rows.column("error").to_pylist()
        target, record = self._schema.field("record").type, rows.schema.field("record").type
        for column, bad in faults.items():
            was, wanted = record.field(column).type, target.field(column).type
            for row in np.flatnonzero(bad).tolist():
                cursor = Cursor(rows["commit_lsn"][row].as_py(), rows["commit_idx"][row].as_py())
                texts[row] = texts[row] or (
                    f"the change at {cursor} of table {relation} does not fit the columns that "
                    f"are read: {column!r} was {was} when it was written, and this value cannot "
                    f"become {wanted} without loss"
                )
        return pa.array(texts, pa.string())
