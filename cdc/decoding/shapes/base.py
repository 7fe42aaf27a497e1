"""What every message shape is: the one seam between decoded changes and what sinks send.

A shape works in two steps. ``rows`` runs once for a batch and adds the columns that are worth
making once; ``messages`` and ``fields`` run on any slice of those rows, as often as a sink cuts
them. Invariants: a row is one message, in its place; the columns of MESSAGE_SCHEMA stay
as they are; and nothing loops over the rows of tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import pyarrow as pa

from cdc.change import MESSAGE_SCHEMA, PLACED_SCHEMA
from cdc.decoding.format import DEFAULT_FORMAT, ValueFormat
from cdc.errors import DecodeError
from cdc.version import VERSION

ShapeName = Literal["sequin", "debezium", "record"]


@dataclass(frozen=True)
class Context:
    """What a message says beyond its change: whose it is, where it comes from, when it was made."""

    consumer: str
    database_name: str  # in the configuration
    hostname: str
    database: str  # on the server
    now_ns: int  # Unix nanoseconds
    format: ValueFormat = DEFAULT_FORMAT
    version: str = VERSION
    of_many: bool = False  # whether the consumer reads several databases


@dataclass(frozen=True)
class Parts:
    """What the text of a message is made of, to tell its size before it is made."""

    columns: tuple[str, ...]
    fixed_bytes: int  # about how many stand between them: keys, punctuation, what is short


class Shape(Protocol):
    """How one consumer sees changes."""

    @property
    def message_parts(self) -> Parts:
        """Those of a whole message."""
        ...

    @property
    def entry_parts(self) -> Parts:
        """Those of the fields of an entry."""
        ...

    def rows(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """CHANGE_SCHEMA rows, with ``before`` or not, as MESSAGE_SCHEMA and what is added here."""
        ...

    def messages(self, rows: pa.RecordBatch, end: str = "") -> pa.StringArray:
        """The whole JSON of each row that ``rows`` gave, and ``end``; never null."""
        ...

    def fields(self, rows: pa.RecordBatch) -> dict[str, pa.StringArray]:
        """The same for sinks whose entries have fields; null stands for JSON's null.

        ``metadata`` is always one of them: by it a sink knows its own entries.
        """
        ...

    def keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        """The key of each row as JSON, for sinks whose messages have one; null for none."""
        ...

    def old_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        """The keys that updates took from their rows, in the form of ``keys``; null for others."""
        ...

    def key_changes(self, rows: pa.RecordBatch) -> tuple[pa.StringArray, pa.StringArray] | None:
        """Of updates that changed the key, what ends the old key and what begins the new one.

        None: the message of the update, under the new key, is all there is.
        """
        ...

    def idempotency_keys(self, rows: pa.RecordBatch) -> pa.StringArray:
        """Of each row what is the same each time it is sent, and of no other row."""
        ...

    def refer(self, rows: pa.RecordBatch, references: pa.StringArray) -> pa.RecordBatch:
        """The same rows; where there is a reference, as ``claim_check`` in place of the content.

        A reference is a JSON object, null for rows that stay as they are.
        """
        ...


def message_rows(changes: pa.RecordBatch) -> pa.RecordBatch:
    """MESSAGE_SCHEMA of changes that are all sound.

    One with an error has no record: made a message, it would be lost without a word.
    """
    error = changes.column("error")
    if error.null_count < len(error):
        raise DecodeError(error.drop_null()[0].as_py())
    placed = PLACED_SCHEMA.names if "origin_lsn" in changes.schema.names else []
    return changes.select([*MESSAGE_SCHEMA.names, *placed])
