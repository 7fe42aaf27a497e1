"""Transactions that are streamed before they end."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from cdc.replication.wire.sealed import Sealed
from tests import pgoutput
from tests.unit.replication.annotated import carried
from tests.unit.replication.streamed_history import Row, Server, Transaction


def wire(*messages: bytes) -> list[bytes]:
    header = struct.pack(">cQQq", b"w", 0, 0, 5)
    return [header + message for message in messages]


def block(xid: int, *messages: bytes, first: bool = True, sub: int | None = None) -> list[bytes]:
    inside = [pgoutput.streamed(sub or xid, message) for message in messages]
    return [pgoutput.stream_start(xid, first=first), *inside, pgoutput.stream_stop()]


def rows(batches: Iterable[Sealed]) -> list[Row]:
    found = []
    for batch in batches:
        for r, annotation in zip(batch.raw.to_pylist(), carried(batch), strict=True):
            schema = batch.schemas[r["schema_id"]] if r["schema_id"] else b""
            found.append(
                Row(
                    r["commit_lsn"], r["commit_idx"], r["xid"], r["commit_ts"],
                    chr(r["kind"]), r["relation"], schema, r["payload"], annotation,
                )
            )  # fmt: skip
    return found


def interleaved(data: st.DataObject, history: Sequence[Transaction]) -> Server:
    """The history sent by a server, its transactions' steps in any order between each other."""
    server = Server()
    left = {number: server.pieces(number, one) for number, one in enumerate(history)}
    while left:
        number = data.draw(st.sampled_from(sorted(left)))
        server.send(number, history[number], left[number].pop(0))
        if not left[number]:
            del left[number]
    return server
