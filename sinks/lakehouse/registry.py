"""Which tables a consumer has made, so that one that is gone is not silently made again.

It is a table of the lake itself. A table is registered behind its creation, or whenever it is found
and is not registered yet, so a crash in between changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from cdc.decoding.relation import Relation
from cdc.errors import OperatorError
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.table import ConflictError, LakeTable, TableState

REGISTRY = LakeTarget("_walbrook", "tables")

_SCHEMA = pa.schema(
    [
        pa.field("target_schema", pa.string()),
        pa.field("target_name", pa.string()),
        pa.field("relation_oid", pa.int64()),
    ]
)
_TRIES_MAX = 10


class Registry:
    """The targets of one consumer, and for each the source's tables that it was written from."""

    def __init__(self, open_table: Callable[[LakeTarget], LakeTable]) -> None:
        self._open_table = open_table
        self._known: dict[LakeTarget, set[int]] | None = None

    def targets(self) -> list[LakeTarget]:
        """All of them, in their order."""
        return sorted(self._tables())

    def note(self, target: LakeTarget, relation_oid: int) -> None:
        """The table is there."""
        if relation_oid in self._tables().get(target, set()):
            return
        row = [target.schema, target.name, relation_oid]
        rows = pa.Table.from_arrays([pa.array([value]) for value in row], schema=_SCHEMA)
        table = self._open_table(REGISTRY)
        for attempt in range(1, _TRIES_MAX + 1):
            try:
                if (state := table.load()) is None:
                    table.create(_SCHEMA, (), TableState())
                    continue
                table.commit(table.write(rows), [], state.moved(state.cursor))
                break
            except ConflictError:
                if attempt == _TRIES_MAX:
                    raise
        self._tables().setdefault(target, set()).add(relation_oid)

    def refuse_lost(self, target: LakeTarget, place: str) -> None:
        """OperatorError for a table that is to be made and has been there."""
        if target in self._tables():
            raise OperatorError(
                f"the table at {place} is gone, and changes that were delivered with it",
                fix="put it back; or begin anew: rewind with destination => 'new_generation'",
                kind="table_gone",
            )

    def refuse_renamed(self, target: LakeTarget, relation: Relation, place: str) -> None:
        """OperatorError for a table of the source whose rows are in another target."""
        for other, oids in self._tables().items():
            if other != target and relation.oid in oids:
                raise OperatorError(
                    f"{relation} had another name, and its rows are in the table {other}",
                    fix=f"move the folder of {other} to {place}; or begin anew: rewind with "
                    "destination => 'new_generation'",
                    kind="table_renamed",
                )

    def _tables(self) -> dict[LakeTarget, set[int]]:
        if self._known is None:
            found: dict[LakeTarget, set[int]] = {}
            table = self._open_table(REGISTRY)
            if table.load() is not None:
                for file in table.files():
                    for row in table.read(file).to_pylist():
                        target = LakeTarget(row["target_schema"], row["target_name"])
                        found.setdefault(target, set()).add(row["relation_oid"])
            self._known = found
        return self._known
