"""How far a table has come, as properties of it that move in the commit of the rows.

Invariants: a table names the consumer that it is of, and no other consumer writes it. The cursor is
a property of the table, not of a snapshot: another writer's snapshot does not lack it, and expiring
snapshots does not lose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cdc.cursor import Cursor
from cdc.errors import OperatorError
from sinks.lakehouse.iceberg.schema import Columns
from sinks.lakehouse.table import TableState

_OWNER: Final = "walbrook.consumer"
_SEQUENCE: Final = "walbrook.sequence"
_CURSOR: Final = "walbrook.cursor"
_RELATION: Final = "walbrook.relation-oid"
_RELOAD: Final = "walbrook.reload"
_COLUMNS: Final = "walbrook.columns"


def state_properties(owner: str, state: TableState) -> dict[str, str]:
    """The properties that say how far the table has come."""
    return {
        _OWNER: owner,
        _SEQUENCE: str(state.sequence),
        _CURSOR: str(state.cursor),
        _RELATION: str(state.relation_oid),
        _RELOAD: str(state.reload),
    }


def column_properties(columns: Columns) -> dict[str, str]:
    """The property that says what the schema cannot."""
    return {_COLUMNS: str(columns)}


def columns_in(properties: Mapping[str, str]) -> Columns:
    """What ``column_properties`` wrote."""
    return Columns.parse(properties[_COLUMNS]) if _COLUMNS in properties else Columns()


def state_in(properties: Mapping[str, str], owner: str, place: str) -> TableState:
    """How far the table has come; raises OperatorError for a table that is not ours."""
    if properties.get(_OWNER) != owner:
        raise OperatorError(
            f"{place} is a table that {owner} has not written",
            fix="give the sink another path or another name of tables, or move the table away",
        )
    return TableState(
        int(properties[_SEQUENCE]),
        Cursor.parse(properties[_CURSOR]),
        int(properties[_RELATION]),
        int(properties.get(_RELOAD, 0)),
    )
