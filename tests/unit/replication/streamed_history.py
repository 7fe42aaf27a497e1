"""Random histories of transactions, as a server sends them in pieces, and what the log must hold.

The server's side is as plain as can be: what it remembers of the tables it described, one message
after another. The expectation is counted by hand, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import orjson
from hypothesis import strategies as st

from cdc.decoding.relation import parse_relation
from cdc.decoding.schema_change import change_between
from tests import pgoutput

How = Literal["whole", "streamed", "prepared", "streamed_prepared"]
Kind = Literal[
    "insert", "truncate", "message", "heartbeat", "own", "set", "refused", "clear", "alter"
]
SPOKEN = ("message", "heartbeat", "set", "refused", "clear")
OWN_OID = 9


class Item(NamedTuple):
    sub: int  # 0 is the transaction itself
    kind: Kind
    oid: int


class Row(NamedTuple):
    """What must stand in the log."""

    lsn: int
    idx: int
    xid: int
    commit_ts: int
    kind: str
    relation: int
    schema: bytes
    payload: bytes
    annotation: bytes | None = None


@dataclass(frozen=True)
class Transaction:
    how: How
    blocks: tuple[tuple[Item, ...], ...]
    aborted: frozenset[int]  # subtransactions, rolled back after the block they last wrote in
    committed: bool
    version: int  # of the tables when it begins


_items = st.builds(
    Item,
    st.integers(0, 2),
    st.sampled_from(["insert"] * 4 + ["set"] * 2 + ["truncate", "own", "refused", "clear"])
    | st.sampled_from(["insert", "message", "heartbeat", "alter"]),
    st.integers(1, 2),
)


@st.composite
def _transactions(draw: st.DrawFn) -> Transaction:
    how: How = draw(
        st.sampled_from(("whole", "streamed", "prepared", "streamed_prepared", "whole", "streamed"))
    )
    pieces = how in ("streamed", "streamed_prepared")
    blocks = draw(
        st.lists(
            st.lists(_items, min_size=1, max_size=4).map(tuple),
            min_size=1,
            max_size=4 if pieces else 1,
        )
    )
    aborted = draw(st.frozensets(st.sampled_from([1, 2]))) if pieces else frozenset()
    if aborted:
        # Postgres does not say of which subtransaction a message is; another test has that case.
        left_out = (*SPOKEN, "alter")
        blocks = [tuple(item for item in block if item.kind not in left_out) for block in blocks]
    committed = how == "whole" or draw(st.booleans())
    return Transaction(how, tuple(blocks), aborted, committed, draw(st.integers(1, 2)))


histories = st.lists(_transactions(), min_size=2, max_size=6)


def relation(oid: int, version: int) -> bytes:
    if oid == OWN_OID:
        return pgoutput.relation(oid, "walbrook", "sources", [("id", 23, True)])
    columns: list[pgoutput.ColumnSpec] = [("id", 23, True)]
    columns += [(f"c{n}", 25) for n in range(1, version)]
    return pgoutput.relation(oid, "public", f"t{oid}", columns)


@dataclass
class Server:
    """Sends transactions piece by piece; ``messages`` is what came, ``rows`` what it means."""

    messages: list[bytes] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    _described: dict[int, int] = field(default_factory=dict)  # to the connection: oid → version
    _in_stream: dict[int, dict[int, int]] = field(default_factory=dict)  # the same, by xid
    _defined: dict[int, int] = field(default_factory=dict)  # the version that was used last
    _altered: dict[int, dict[int, int]] = field(default_factory=dict)  # by xid: oid → how often
    _logged: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # version, description
    _payloads: int = 0
    _texts: dict[bytes, bytes] = field(default_factory=dict)  # by the message that set them
    _lsn: int = 1000

    def pieces(self, number: int, transaction: Transaction) -> list[tuple[str, object]]:
        """The steps in which a transaction is sent; those of others may come between them."""
        if transaction.how == "whole":
            return [("whole", None)]
        if transaction.how == "prepared":
            return [("prepare", None), ("decide", None)]
        steps: list[tuple[str, object]] = []
        for at in range(len(transaction.blocks)):
            steps.append(("block", at))
            steps += [("abort", sub) for sub in sorted(self._over(transaction, at))]
        if transaction.how == "streamed_prepared":
            steps.append(("stream_prepare", None))
        return [*steps, ("decide", None)]

    def send(self, number: int, transaction: Transaction, step: tuple[str, object]) -> None:
        xid, name, detail = 100 * (number + 1), *step
        if name == "whole":
            self._whole(xid, transaction)
        elif name == "prepare":
            self.messages.append(pgoutput.begin_prepare(self._next_lsn(), xid, f"gid {number}"))
            self._remember(xid, self._plain(xid, transaction.blocks[0], transaction.version))
            self.messages.append(pgoutput.prepare(self._lsn, xid, f"gid {number}"))
        elif name == "block":
            assert isinstance(detail, int)
            self._block(xid, transaction, detail)
        elif name == "abort":
            assert isinstance(detail, int)
            self.messages.append(pgoutput.stream_abort(xid, xid + detail))
            self._in_stream[xid].clear()
        elif name == "stream_prepare":
            self.messages.append(pgoutput.stream_prepare(self._next_lsn(), xid, f"gid {number}"))
        else:
            self._decide(number, xid, transaction)

    _contents: dict[int, list[tuple[Item, bytes, bytes]]] = field(default_factory=dict)

    def _whole(self, xid: int, transaction: Transaction) -> None:
        lsn = self._next_lsn()
        self.messages.append(pgoutput.begin(lsn, lsn * 10, xid))
        self._remember(xid, self._plain(xid, transaction.blocks[0], transaction.version))
        self.messages.append(pgoutput.commit(lsn, lsn + 8, lsn * 10))
        self._count(xid, frozenset(), lsn)

    def _plain(
        self, xid: int, items: Sequence[Item], begun: int
    ) -> list[tuple[Item, bytes, bytes]]:
        sent = []
        for item in items:
            version = self._version(xid, item, begun)
            if item.kind == "alter":
                continue
            self._describe(self._described, item, version, None)
            sent.append((item, self._payload(item), relation(item.oid, version)))
            self.messages.append(sent[-1][1])
        return sent

    def _block(self, xid: int, transaction: Transaction, at: int) -> None:
        known = self._in_stream.setdefault(xid, {})
        self.messages.append(pgoutput.stream_start(xid, first=at == 0))
        sent = []
        for item in transaction.blocks[at]:
            if item.sub in self._gone(transaction, at):
                continue
            version = self._version(xid, item, transaction.version)
            if item.kind == "alter":
                continue
            self._describe(known, item, version, xid + item.sub)
            payload = self._payload(item)
            spoken = item.kind in SPOKEN
            self.messages.append(pgoutput.streamed(xid if spoken else xid + item.sub, payload))
            sent.append((item, payload, relation(item.oid, version)))
        self._remember(xid, sent)
        self.messages.append(pgoutput.stream_stop())

    def _decide(self, number: int, xid: int, transaction: Transaction) -> None:
        lsn, gid = self._next_lsn(), f"gid {number}"
        streamed = transaction.how == "streamed"
        if not transaction.committed:
            self.messages.append(
                pgoutput.stream_abort(xid, xid)
                if streamed
                else pgoutput.rollback_prepared(lsn - 1, lsn, xid, gid)
            )
            return
        if streamed:
            self.messages.append(pgoutput.stream_commit(xid, lsn, lsn + 8, lsn * 10))
            self._described.update(self._in_stream[xid])
        else:
            self.messages.append(pgoutput.commit_prepared(lsn, lsn * 10, xid, gid))
        self._count(xid, transaction.aborted, lsn)

    def _version(self, xid: int, item: Item, begun: int) -> int:
        """Of the item's table, in a transaction that began with the version ``begun``."""
        altered = self._altered.setdefault(xid, {})
        if item.kind == "alter":
            altered[item.oid] = altered.get(item.oid, 0) + 1
        return begun + altered.get(item.oid, 0)

    def _count(self, xid: int, aborted: frozenset[int], lsn: int) -> None:
        number, free, said = 0, 0, None
        described: dict[int, bytes] = {}

        def count(
            kind: str, oid: int, schema: bytes, payload: bytes, text: bytes | None = None
        ) -> None:
            nonlocal number, free
            opens = oid != 0 and described.get(oid) != schema
            described[oid] = schema
            free += opens and number > 0
            idx = number + free
            number += 1
            if oid not in (0, OWN_OID):
                place = (lsn, idx - 1) if idx else (lsn - 1, 1)
                self._log_version(oid, schema, place, lsn * 10)
            if kind:
                self.rows.append(Row(lsn, idx, xid, lsn * 10, kind, oid, schema, payload, text))

        for item, payload, schema in self._contents.pop(xid, []):
            if item.sub in aborted:
                continue
            if item.kind == "truncate":
                count("T", item.oid, schema, pgoutput.truncate([item.oid]), said)
                # Our own table, truncated with it, takes a number too.
                count("", OWN_OID, relation(OWN_OID, 1), b"")
            elif item.kind == "insert":
                count("I", item.oid, schema, payload, said)
            elif item.kind == "own":
                count("", OWN_OID, relation(OWN_OID, 1), b"")
            elif item.kind == "heartbeat":
                count("", 0, b"", payload)
            elif item.kind == "message":
                count("M", 0, b"", payload, said)
            else:
                count("M", 0, b"", payload)
                said = self._texts.get(payload)

    def _log_version(self, oid: int, schema: bytes, place: tuple[int, int], ts: int) -> None:
        """A schema change, if the table's last row in the log was of another version."""
        number, before = self._logged.get(oid, (0, b""))
        if schema == before:
            return
        self._logged[oid] = (number + 1, schema)
        if number:
            change = change_between(parse_relation(before), parse_relation(schema), number + 1)
            payload = b"S" + orjson.dumps(change, option=orjson.OPT_SORT_KEYS)
            self.rows.append(Row(*place, 0, ts, "S", oid, schema, payload))

    def _describe(
        self, known: dict[int, int], item: Item, version: int, subxid: int | None
    ) -> None:
        oids = {"insert": [item.oid], "truncate": [item.oid, OWN_OID], "own": [OWN_OID]}
        for oid in oids.get(item.kind, []):
            wanted = 1 if oid == OWN_OID else version
            self._define(oid, wanted)
            if known.get(oid) != wanted:
                known[oid] = wanted
                message = relation(oid, wanted)
                self.messages.append(
                    message if subxid is None else pgoutput.streamed(subxid, message)
                )

    def _define(self, oid: int, version: int) -> None:
        """A table that has changed must be described again, to everyone: all caches forget it."""
        if self._defined.setdefault(oid, version) != version:
            self._defined[oid] = version
            for cache in (self._described, *self._in_stream.values()):
                cache.pop(oid, None)

    def _payload(self, item: Item) -> bytes:
        self._payloads += 1
        if item.kind == "truncate":
            return pgoutput.truncate([item.oid, OWN_OID])
        if item.kind == "message":
            return pgoutput.logical_message("note", str(self._payloads).encode())
        product = "walbrook" if item.oid == 1 else "sequin"
        verb = f"{product}:transaction_annotations"
        if item.kind == "set":
            text = b'{"n":%d}' % self._payloads
            payload = pgoutput.logical_message(f"{verb}.set", text)
            self._texts[payload] = text
            return payload
        if item.kind == "refused":
            return pgoutput.logical_message(f"{verb}.set", b"{")
        if item.kind == "clear":
            return pgoutput.logical_message(f"{verb}.clear", b"")
        if item.kind == "heartbeat":
            return pgoutput.logical_message("walbrook.heartbeat", b"beat")
        return pgoutput.insert(OWN_OID if item.kind == "own" else item.oid, [str(self._payloads)])

    def _remember(self, xid: int, sent: list[tuple[Item, bytes, bytes]]) -> None:
        self._contents.setdefault(xid, []).extend(sent)

    def _gone(self, transaction: Transaction, at: int) -> set[int]:
        """Subtransactions that were rolled back before the block ``at``."""
        return {sub for sub in transaction.aborted for before in range(at)
                if sub in self._over(transaction, before)}  # fmt: skip

    def _over(self, transaction: Transaction, at: int) -> set[int]:
        """Subtransactions whose rollback is sent after the block ``at``: after their first one."""
        written = [{item.sub for item in block} for block in transaction.blocks]
        return {
            sub
            for sub in transaction.aborted
            if sub in written[at] and not any(sub in earlier for earlier in written[:at])
        }

    def _next_lsn(self) -> int:
        self._lsn += 100
        return self._lsn
