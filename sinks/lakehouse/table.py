"""The seam between the sink and a table format: one table, its files, and its position.

The invariant of an implementation:

- A commit is atomic: files, schema and state become visible together, or nothing of it does.
- A file is durable before the commit that names it, and the commit before the call returns.
- A commit that rests on what is not so any more raises ConflictError and changes nothing: another
  process moved the state, or a file that the commit removes is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import TransientError

if TYPE_CHECKING:
    from sinks.lakehouse.columns import Evolution

ATTNUM = b"walbrook.attnum"
"""The key in a field's metadata of the number that the source's catalog has for the column."""


class ConflictError(TransientError):
    """Another writer was faster; what rests on the table's files must be worked out again."""


@dataclass(frozen=True)
class TableState:
    """What a table records of its consumer, in the commit of the rows.

    Everything of the table at or below ``cursor`` is in it. ``sequence`` counts the commits of the
    consumer; ``relation_oid`` is the source's table as its catalog numbers it.
    """

    sequence: int = 0
    cursor: Cursor = ORIGIN
    relation_oid: int = 0
    reload: int = 0  # the reload for which the table has a shadow; 0: it has none

    def moved(self, cursor: Cursor) -> TableState:
        """The state of the next commit."""
        return replace(self, sequence=self.sequence + 1, cursor=cursor)


@dataclass(frozen=True)
class DataFile:
    """A file of a table; ``bounds`` has lowest and highest value of columns, as far as known.

    ``deletes`` counts the keys that a reader has to look up in it, because their rows were deleted.
    """

    path: str
    rows: int
    size: int
    partition: Mapping[str, str | None] = field(default_factory=dict)
    bounds: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    deletes: int = 0
    stats: str = ""  # of a new file, in the words of the format


class LakeTable(Protocol):
    """One table of the lake, as one consumer writes it."""

    @property
    def place(self) -> str:
        """Where it is, without secrets."""
        ...

    @property
    def schema(self) -> pa.Schema:
        """Its columns, as they were when it was last loaded."""
        ...

    def probe(self) -> str:
        """Look at the place, and write nothing. Returns what was found, in one line."""
        ...

    def load(self) -> TableState | None:
        """Look at the table as it is now. Returns its state; None if there is no such table."""
        ...

    def create(self, schema: pa.Schema, partition_by: Sequence[str], state: TableState) -> None: ...

    def alter(self, evolution: Evolution, state: TableState) -> bool:
        """Change columns without writing a file, in one commit or the first of several.

        Returns False, with nothing changed, if the format cannot.
        """
        ...

    def files(self) -> list[DataFile]:
        """The files of the table as it was when it was last loaded."""
        ...

    def read(self, file: DataFile, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a file, in their order, in the table's own types.

        A format whose files keep the columns that they were written with gives those, unless
        ``columns`` names columns of the table: these it gives as the table has them now.
        """
        ...

    def write(self, rows: pa.Table) -> list[DataFile]:
        """Write new files, one per partition; no reader sees them before they are committed."""
        ...

    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], state: TableState | None
    ) -> None:
        """Add and remove files; without a state the rows are the same as before, in other files."""
        ...

    def replace(self, added: Sequence[DataFile], schema: pa.Schema, state: TableState) -> None:
        """In place of all files that the table had when it was last loaded."""
        ...

    def vacuum(self, retain_hours: int) -> int:
        """Remove files that no version of the last hours has. Returns how many."""
        ...

    def drop(self) -> None:
        """Remove the table with all of its files; there may be none."""
        ...
