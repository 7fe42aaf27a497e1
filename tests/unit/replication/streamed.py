"""Transactions that are streamed before they end."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import strategies as st

from cdc.replication.spill.spill import Spill
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
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


ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True)])


def row(value: object = 1) -> bytes:
    return pgoutput.insert(1, [str(value)])


def take(intake: TransactionAssembler, *messages: bytes) -> list[Row]:
    return rows(intake.take(wire(*messages)))


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    return Spill(tmp_path / "log" / "spill")


@pytest.fixture
def intake(spill: Spill) -> TransactionAssembler:
    return TransactionAssembler(Sealer(), spill)


def consume(steps: Iterable[object]) -> None:
    for _ in steps:
        pass


def begun(directory: Path, *, bytes_max: int = 1 << 20) -> Spill:
    """A spill of a connection that gets prepared transactions."""
    spill = Spill(directory, bytes_max=bytes_max)
    spill.start(0, 0, two_phase=True)
    return spill


def names(directory: Path) -> list[str]:
    """The files of rows."""
    return [path.name for path in directory.glob("*.rows")]


def prepare(intake: TransactionAssembler, value: object = 1, *, xid: int = 8) -> list[Row]:
    begin, end = pgoutput.begin_prepare(200, xid, "g"), pgoutput.prepare(200, xid, "g")
    return take(intake, begin, ITEM, row(value), end)


def secured(directory: Path) -> None:
    """A prepared transaction that is on disk."""
    spill = begun(directory)
    prepare(TransactionAssembler(Sealer(), spill))
    spill.secure(300, 300)
