"""What the expressions of a window see of all tables of its consumer at once.

A window is over the changes of all tables, so there is one ``record`` for all of them: it has every
column of any. Invariant: a column that an expression looks at has one type, whatever
the table; one that a table lacks is null in its changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from cdc.decoding.plan import TablePlan
from cdc.decoding.types.builtin import NUMERIC_OID
from cdc.decoding.types.form import TypeForm
from cdc.decoding.types.json import JSON
from spark_pipeline.expressions.visible_rows import schema_over

Tables = Mapping[str, Sequence[TablePlan]]
"""The tables that a consumer takes, by the name of their database."""


@dataclass(frozen=True)
class TablesColumn:
    """A column as the first table has it that has one of this name."""

    form: TypeForm
    place: str
    is_numeric_text: bool  # a numeric that no decimal holds: text to Spark

    @property
    def is_json(self) -> bool:
        return self.form is JSON

    @property
    def type_name(self) -> str:
        return "json" if self.is_json else self.form.spark

    def conflict(self, other: TablesColumn) -> str:
        """How two columns of one name differ; nothing if they do not."""
        if self.type_name == other.type_name:
            return ""
        return f"{self.type_name} in {self.place} but {other.type_name} in {other.place}"


@dataclass(frozen=True)
class WindowTables:
    """The columns of all tables by name, and those on whose type the tables do not agree."""

    columns: Mapping[str, TablesColumn]
    conflicts: Mapping[str, str]

    @classmethod
    def of(cls, tables: Tables) -> WindowTables:
        columns: dict[str, TablesColumn] = {}
        conflicts: dict[str, str] = {}
        for database, plans in tables.items():
            for plan in plans:
                for at, name in enumerate(plan.names):
                    column = TablesColumn(
                        plan.types[at],
                        f"table {plan.relation} of database {database}",
                        _is_numeric_text(plan, at),
                    )
                    known = columns.setdefault(name, column)
                    if what := known.conflict(column):
                        conflicts.setdefault(name, what)
        return cls(columns, conflicts)

    @cached_property
    def schema(self) -> pa.Schema:
        """``record``, ``changes``, ``action`` and ``metadata``, as all expressions see them."""
        return schema_over(
            pa.struct([pa.field(name, one.form.arrow) for name, one in self.columns.items()])
        )


def _is_numeric_text(plan: TablePlan, at: int) -> bool:
    return plan.relation.columns[at].type_oid == NUMERIC_OID and plan.types[at].arrow == pa.string()
