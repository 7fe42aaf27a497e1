"""Tables as the server announced them, and the schema that the log keeps of each.

A Relation message holds from where it was sent on: for the connection, or, inside a stream, for
that transaction alone. Invariant: the catalog is asked about a table only when a committed row
needs it, because an ordinary connection cannot see a table before its transaction has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation, from_encoding, parse_relation, with_catalog
from cdc.errors import ProtocolError
from cdc.replication.wire.wire import RELATION, Ints, Wire

OWN_SCHEMA = "walbrook"
"""Our own tables never enter the stream: settling a change would otherwise make a new one."""

CatalogOf = Callable[[Relation, int], CatalogNote]
"""Asks the source's catalog about a table: its key, its columns' numbers, its types.

The number is the transaction of the first row that needs the answer."""


def no_catalog(_relation: Relation, _xid: int) -> CatalogNote:
    return CatalogNote()


@dataclass(frozen=True)
class Schema:
    """What stands in the log: the message with the catalog's answer behind it, and its hash."""

    schema_id: int
    message: bytes


@dataclass
class Announced:
    """A Relation message and when it came, counted in messages of the connection."""

    message: bytes
    relation: Relation
    at: int
    _bare: Schema | None = None
    _schema: Schema | None = None

    @property
    def own(self) -> bool:
        return self.relation.namespace == OWN_SCHEMA

    @property
    def bare(self) -> Schema:
        """The message as it came."""
        if self._bare is None:
            self._bare = Schema(xxhash.xxh3_64_intdigest(self.message), self.message)
        return self._bare

    @property
    def noted(self) -> Schema | None:
        """The same with what the catalog says, once it was asked."""
        return self._schema

    def schema(self, catalog_of: CatalogOf, xid: int) -> Schema:
        """With what the catalog says; it is asked once, for a row of transaction ``xid``."""
        if self._schema is None:
            self._schema = noted(self.message, self.relation, catalog_of, xid)
        return self._schema


def noted(message: bytes, relation: Relation, catalog_of: CatalogOf, xid: int) -> Schema:
    whole = with_catalog(message, catalog_of(relation, xid))
    return Schema(xxhash.xxh3_64_intdigest(whole), whole)


@dataclass
class Relations:
    """The tables known to a connection, or to one streamed transaction."""

    _by_oid: dict[int, Announced] = field(default_factory=dict)

    def known(self, oid: int) -> Announced | None:
        """What was announced of a table last."""
        return self._by_oid.get(oid)

    def in_force(
        self, wire: Wire, row: Ints, relation: Ints, first: int, codec: str = ""
    ) -> Iterator[tuple[Announced, Ints]]:
        """For the rows of ``wire``: a table version, and which of them were sent under it.

        ``first`` is the number of the batch's first message among the connection's; ``codec`` what
        the connection's texts are in, if not in UTF-8.
        """
        announced = np.flatnonzero(wire.kind == RELATION)
        cuts = np.searchsorted(row, announced)
        for start, end, message in zip(
            [0, *cuts], [*cuts, len(row)], [None, *announced], strict=True
        ):
            if message is not None:
                self._announce(wire.message(int(message)), first + int(wire.place[message]), codec)
            for rows in by_value(relation[start:end]):
                oid = int(relation[start + rows[0]])
                if oid == 0:
                    continue
                known = self._by_oid.get(oid)
                if known is None:
                    raise ProtocolError(
                        f"a change names relation {oid}, which the server never described",
                        fix="reconnect; if it stays, report it with the server's version",
                    )
                yield known, start + rows

    def adopt(self, of_transaction: Relations, since: int) -> None:
        """What a streamed transaction announced after ``since`` holds for the connection now.

        The server thinks so too, unless it has described the table to the connection since then.
        """
        for oid, announced in of_transaction._by_oid.items():
            known = self._by_oid.get(oid)
            if announced.at > since and (known is None or known.at < announced.at):
                self._by_oid[oid] = announced

    def _announce(self, message: bytes, at: int, codec: str) -> None:
        if codec:
            message = from_encoding(message, codec)
        relation = parse_relation(message)
        self._by_oid[relation.oid] = Announced(message, relation, at)


def by_value(values: Ints) -> list[Ints]:
    """The positions of each value, rising."""
    if not len(values):
        return []
    small = values - values.min()
    # The sort for small integers is several times faster, and oids are mostly close together.
    order = np.argsort(small.astype(np.uint16) if small.max() < 65536 else small, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
