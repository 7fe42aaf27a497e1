"""The decoder for anyone's own program: pgoutput messages in, Arrow out. No Spark, no service.

``walbrook.decode`` and ``walbrook.Decoder`` are what programs see of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import psycopg
import pyarrow as pa

from cdc.change import CHANGE_SCHEMA
from cdc.decoding import decode_changes
from cdc.decoding.annotations import annotations_of
from cdc.decoding.catalog import CatalogNote
from cdc.decoding.format import DEFAULT_FORMAT, ValueFormat, Wanted
from cdc.decoding.relation import Relation
from cdc.decoding.typed import TableRows, decode_tables
from cdc.replication.protocol import XLOG_HEADER_BYTES
from cdc.replication.source.catalog import ask_catalog
from cdc.replication.wire.relations import CatalogOf, no_catalog
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed

__all__ = ["Decoded", "Decoder", "ValueFormat", "catalog_of", "decode"]

_ENVELOPE = bytes(XLOG_HEADER_BYTES)


@dataclass(frozen=True)
class Decoded:
    """What some messages say; each form is worked out when it is first asked for."""

    sealed: Sealed | None
    form: ValueFormat = DEFAULT_FORMAT

    @cached_property
    def changes(self) -> pa.RecordBatch:
        """One row per change, of all tables, with the rows as JSON: CHANGE_SCHEMA."""
        sealed = self.sealed
        if sealed is None:
            return pa.RecordBatch.from_pylist([], CHANGE_SCHEMA)
        return decode_changes(
            sealed.raw,
            sealed.schemas,
            annotations=annotations_of(sealed.annotations, sealed.raw.num_rows),
            wanted=Wanted((self.form,)),
        )

    @cached_property
    def tables(self) -> list[TableRows]:
        """The rows of each table version in typed columns."""
        if self.sealed is None:
            return []
        return list(decode_tables(self.sealed.raw, self.sealed.schemas))


@dataclass
class Decoder:
    """Decodes a stream in pieces of any size, which may cut transactions.

    ``catalog`` says what pgoutput leaves out: primary keys and types that are not built in. With
    ``catalog_of(connection)`` it asks the source; without, such types are their text and the key is
    the replica identity.
    """

    catalog: CatalogOf = no_catalog
    form: ValueFormat = DEFAULT_FORMAT
    _sealer: Sealer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._sealer = Sealer(catalog_of=self.catalog)

    def decode(self, messages: Iterable[bytes]) -> Decoded:
        """The next messages of the stream, in the order and form that pgoutput wrote them."""
        enveloped = [_ENVELOPE + _checked(message) for message in messages]
        # A piece may be empty: a slot that has nothing new is read like any other.
        return Decoded(self._sealer.seal(enveloped) if enveloped else None, self.form)


def decode(
    messages: Iterable[bytes],
    *,
    catalog: CatalogOf = no_catalog,
    form: ValueFormat = DEFAULT_FORMAT,
) -> Decoded:
    """Decode pgoutput messages: from a Begin or a Relation on, in order, protocol 1.

    Read them with ``client_encoding`` UTF8, ``DateStyle`` ISO and ``bytea_output`` hex, and with
    ``TimeZone`` UTC if timestamps are to say Z.
    """
    return Decoder(catalog, form).decode(messages)


def _checked(message: object) -> bytes:
    if not isinstance(message, bytes | bytearray | memoryview):
        raise TypeError(f"a pgoutput message is bytes, not {type(message).__name__}")
    return bytes(message)


def catalog_of(connection: psycopg.Connection[Any]) -> CatalogOf:
    """Ask this connection, once for each table version."""

    def ask(relation: Relation, xid: int) -> CatalogNote:
        return ask_catalog(connection, relation, xid)

    return ask
