"""What a manifest says: the files of a table, their columns, and how far its consumer is. Pure.

Invariant: the position and the list of files are one object, so they are replaced together. Readers
go by ``files``; the rest is for the sink.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
import pyarrow as pa

from cdc.cursor import Cursor
from cdc.errors import CorruptionError, OperatorError
from sinks.lakehouse.table import DataFile, TableState

MANIFEST: Final = "_manifest.json"
_FORMAT: Final = 1
VERSION: Final = "version"
"""The part of a file's partition that says which columns it has; it is the first folder."""


@dataclass(frozen=True)
class TableManifest:
    """``schemas`` are the versions of the columns, of which a file has one; the last is current."""

    consumer: str
    schemas: tuple[pa.Schema, ...]
    partition_by: tuple[str, ...]
    state: TableState
    truncation: int = 0
    commit: int = 1  # of any kind, so that no two manifests are the same
    files: tuple[DataFile, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The columns of files that are written now."""
        return self.schemas[-1]

    def changed(
        self, added: Iterable[DataFile], removed: Collection[str], state: TableState
    ) -> TableManifest:
        """With other files, at another position."""
        kept = tuple(file for file in self.files if file.path not in removed)
        return replace(self, commit=self.commit + 1, state=state, files=(*kept, *added))

    def with_schema(self, schema: pa.Schema, state: TableState) -> TableManifest:
        """With other columns for the files that come."""
        return replace(self, commit=self.commit + 1, state=state, schemas=(*self.schemas, schema))

    def truncated(self, truncation: int) -> TableManifest:
        """With the same files, of another truncation."""
        return replace(self, commit=self.commit + 1, truncation=truncation)

    def emptied(self, truncation: int) -> TableManifest:
        """Without files, and before the first change."""
        state = TableState(self.state.sequence + 1, relation_oid=self.state.relation_oid)
        return replace(self, commit=self.commit + 1, state=state, truncation=truncation, files=())

    def version_of(self, rows: pa.Schema) -> int:
        """The latest version with these columns, or the one that ``with_schema`` makes of them."""
        for version in range(len(self.schemas), 0, -1):
            if self.schemas[version - 1].equals(rows, check_metadata=True):
                return version
        return len(self.schemas) + 1

    def write(self) -> bytes:
        """The manifest as it is stored."""
        state = self.state
        return orjson.dumps(
            {
                "format": _FORMAT,
                "consumer": self.consumer,
                "commit": self.commit,
                "sequence": state.sequence,
                "cursor": str(state.cursor),
                "relation_oid": state.relation_oid,
                "reload": state.reload,
                "truncation": self.truncation,
                "partition_by": self.partition_by,
                "files": [
                    {
                        "path": file.path,
                        "rows": file.rows,
                        "bytes": file.size,
                        VERSION: int(str(file.partition[VERSION])),
                        "partition": {
                            name: value for name, value in file.partition.items() if name != VERSION
                        },
                    }
                    for file in self.files
                ],
                "versions": [
                    {
                        VERSION: number,
                        "columns": {each.name: str(each.type) for each in schema},
                        "arrow": base64.b64encode(schema.serialize()).decode(),
                    }
                    for number, schema in enumerate(self.schemas, start=1)
                ],
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )


def read_manifest(content: bytes, place: str) -> TableManifest:
    """What ``write`` wrote."""
    try:
        found: dict[str, Any] = orjson.loads(content)
        number = found["format"]
        if number == _FORMAT:
            return _manifest(found)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"the manifest of the table at {place} cannot be read",
            fix="restore the file, or begin anew: rewind with destination => 'new_generation'",
            detail=str(error),
        ) from None
    raise OperatorError(
        f"the manifest of the table at {place} has the format {number}, which this version does "
        "not know",
        fix="use the version of walbrook that wrote it, or give the sink another place",
    )


def _manifest(found: dict[str, Any]) -> TableManifest:
    return TableManifest(
        consumer=found["consumer"],
        schemas=tuple(_schema(each["arrow"]) for each in found["versions"]),
        partition_by=tuple(found["partition_by"]),
        state=TableState(
            found["sequence"], Cursor.parse(found["cursor"]), found["relation_oid"], found["reload"]
        ),
        truncation=found["truncation"],
        commit=found["commit"],
        files=tuple(
            DataFile(
                each["path"],
                each["rows"],
                each["bytes"],
                {VERSION: str(each[VERSION]), **each["partition"]},
            )
            for each in found["files"]
        ),
    )


def _schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
