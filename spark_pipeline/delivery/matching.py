"""Which changes are a consumer's: by table, schema and action, whole columns at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import READ
from cdc.config import SinkConfig

_FEW = 48  # up to about so many rows a loop costs less than a call of Arrow


@dataclass(frozen=True)
class Match:
    """A consumer's tables and actions; None means no restriction of that kind."""

    actions: tuple[str, ...]
    include_schemas: frozenset[str] | None = None
    exclude_schemas: frozenset[str] = frozenset()
    include_tables: frozenset[str] | None = None
    exclude_tables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, sink: SinkConfig) -> Match:
        source = sink.source
        return cls(
            actions=(*sink.actions, READ),
            include_schemas=_optional(source.include_schemas),
            exclude_schemas=_optional(source.exclude_schemas) or frozenset(),
            include_tables=_optional(source.include_tables),
            exclude_tables=_optional(source.exclude_tables) or frozenset(),
        )

    def takes(self, schema: str, table: str) -> bool:
        qualified = f"{schema}.{table}"
        return (
            (self.include_schemas is None or schema in self.include_schemas)
            and schema not in self.exclude_schemas
            and (self.include_tables is None or qualified in self.include_tables)
            and qualified not in self.exclude_tables
        )

    def takes_any(self, tables: Iterable[tuple[str, str]]) -> bool:
        """Whether some change of these tables may be taken; one of no table is a message."""
        return any(not table or self.takes(schema, table) for schema, table in tables)

    def select(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of ``changes`` that this consumer takes, in their order."""
        action = changes.column("action")
        few = changes.num_rows <= _FEW and self._takes_all_tables()
        if few and all(each in self.actions for each in action.to_pylist()):
            return changes
        wanted = pc.is_in(action, _value_set(self.actions))
        tables = self._tables(changes)
        if tables is not None:
            # Logical messages belong to no table: asking for the action is enough.
            wanted = pc.and_(wanted, pc.or_(tables, pc.equal(action, "message")))
        # A filter copies every column, and most consumers take all that there is.
        return changes if pc.all(wanted).as_py() else changes.filter(wanted)

    def _takes_all_tables(self) -> bool:
        included = self.include_schemas is None and self.include_tables is None
        return included and not self.exclude_schemas and not self.exclude_tables

    def _tables(self, changes: pa.RecordBatch) -> pa.Array | None:
        """Per row whether its table is wanted; None when all of them are."""
        if self._takes_all_tables():
            return None
        schema = changes.column("table_schema").dictionary_encode()
        table = changes.column("table_name").dictionary_encode()
        pair = pc.add(
            pc.multiply(schema.indices.cast(pa.int64()), len(table.dictionary)), table.indices
        )
        answers: dict[int, bool] = {}
        for code in pc.unique(pair).to_pylist():
            at_schema, at_table = divmod(code, len(table.dictionary))
            answers[code] = self.takes(
                schema.dictionary[at_schema].as_py(), table.dictionary[at_table].as_py()
            )
        if all(answers.values()):
            return None
        return pc.is_in(pair, pa.array([code for code, yes in answers.items() if yes], pa.int64()))


@lru_cache(maxsize=256)
def _value_set(actions: tuple[str, ...]) -> pa.Array:
    """Made once: without pandas Arrow looks for it whenever it is handed Python values."""
    return pa.array(actions, pa.string())


def _optional(names: Sequence[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)
