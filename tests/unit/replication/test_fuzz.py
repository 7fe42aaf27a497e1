"""A hundred thousand broken messages: each gives a typed error or batches, in bounded memory."""

from __future__ import annotations

import os
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc.decoding.annotations import decode_annotations, encode_annotations
from cdc.errors import DecodeError, GapError, ProtocolError
from cdc.replication.protocol import parse_keepalive
from cdc.replication.spill.spill import NotStreamableError, Spill
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from tests import pgoutput
from tests.unit.replication.annotated import set_annotation

BROKEN_MESSAGES, MANY_MORE = 30_000, 300_000  # more of them with make chaos
MEMORY_MAX_BYTES = 256 << 20

HEADER = struct.pack(">cQQq", b"w", 100, 200, 5)
ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])
PART = pgoutput.relation(2, "public", "part", [("id", 23, True)])
TYPE, ORIGIN = b"Y" + struct.pack(">I", 9) + b"public\0mood\0", b"O" + bytes(8) + b"elsewhere\0"
ROW = pgoutput.insert(1, ["1", "one"])
CHANGES = [
    ROW,
    pgoutput.update(1, ["1", "two"], key=["1", None]),
    pgoutput.delete(1, key=["1", None]),
    pgoutput.truncate([1, 2], cascade=True),
    pgoutput.logical_message("note", b"hello"),
    set_annotation(b'{"user": 7}'),
    ROW,
    pgoutput.logical_message("sequin:transaction_annotations.clear", b""),
]
BEAT = pgoutput.logical_message("walbrook.heartbeat", b"1", transactional=False, lsn=90)

LOOSE = pgoutput.logical_message("note", b"x", transactional=False, lsn=95)


def in_block(xid: int, *messages: bytes, first: bool = True) -> list[bytes]:
    inside = [pgoutput.streamed(xid, message) for message in messages]
    return [pgoutput.stream_start(xid, first=first), *inside, pgoutput.stream_stop()]


HISTORIES = [
    [pgoutput.begin(100, 0, 7), ORIGIN, TYPE, ITEM, PART, *CHANGES, pgoutput.commit(100, 108, 0)],
    [BEAT, LOOSE, ITEM, pgoutput.begin(100, 0, 7), ROW, ROW, pgoutput.commit(100, 108, 0)],
    [*in_block(7, TYPE, ITEM, PART, *CHANGES), pgoutput.stream_commit(7, 300, 308, 0)],
    [
        *in_block(7, ITEM, ROW),
        *in_block(8, ITEM, ROW),
        *in_block(7, ROW, first=False),
        pgoutput.stream_abort(7, 9),
        pgoutput.stream_abort(8, 8, parallel=True),
        pgoutput.stream_commit(7, 300, 308, 0),
    ],
    [
        pgoutput.begin_prepare(200, 7, "g"), ITEM, ROW, pgoutput.prepare(200, 7, "g"),
        pgoutput.commit_prepared(300, 0, 7, "g"),
    ],
    [
        *in_block(7, ITEM, ROW), pgoutput.stream_prepare(200, 7, "g"),
        pgoutput.rollback_prepared(200, 300, 7, "g"),
    ],
]  # fmt: skip
KEEPALIVE = struct.pack(">cQqB", b"k", 100, 5, 1)


def flip(rng: random.Random, message: bytes) -> bytes:
    at = rng.randrange(len(message))
    return message[:at] + bytes([message[at] ^ (1 << rng.randrange(8))]) + message[at + 1 :]


def scribble(rng: random.Random, message: bytes) -> bytes:
    at = rng.randrange(len(message))
    return message[:at] + rng.randbytes(rng.randint(1, 8)) + message[at + 1 :]


def cut(rng: random.Random, message: bytes) -> bytes:
    return message[: rng.randrange(len(message))]


def stretch(rng: random.Random, message: bytes) -> bytes:
    at, size = rng.randrange(len(message)), rng.randint(1, 40)
    return message[:at] + message[at : at + size] * rng.randint(2, 4) + message[at + size :]


def exaggerate(rng: random.Random, message: bytes) -> bytes:
    """An integer somewhere becomes an absurd one, as counts and lengths do."""
    absurd = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\0"])
    at = rng.randrange(len(message))
    return message[:at] + absurd + message[at + 4 :]


def other_kind(rng: random.Random, message: bytes) -> bytes:
    return rng.choice(b"IUDTMBCRYOSEcApbPKr").to_bytes() + message[1:]


BREAKS: list[Callable[[random.Random, bytes], bytes]] = [
    flip, flip, scribble, cut, stretch, exaggerate, other_kind,
]  # fmt: skip


def broken_history(rng: random.Random) -> tuple[list[bytes], int]:
    """A history with some messages broken, now and then one repeated out of place; how many."""
    messages = list(rng.choice(HISTORIES))
    broken = rng.sample(range(len(messages)), min(len(messages), rng.choice([1, 2, 4, 8, 8])))
    for at in broken:
        messages[at] = rng.choice(BREAKS)(rng, messages[at])
    if rng.random() < 0.25:
        one, other = rng.randrange(len(messages)), rng.randrange(len(messages))
        messages[one], messages[other] = messages[other], messages[one]
        messages.insert(one, messages[other])
    return [HEADER + message for message in messages], len(broken)


@pytest.mark.parametrize(
    "count", [BROKEN_MESSAGES, pytest.param(MANY_MORE, marks=pytest.mark.chaos)]
)
def test_broken_messages_give_typed_errors_or_batches_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # what survives is not asked here
    done = rounds = refused = batches = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while done < count:
        if rounds % 1000 == 0:
            spill = Spill(tmp_path / str(rounds))
        rounds += 1
        messages, broken = broken_history(rng)
        done += broken
        try:
            for sealed in TransactionAssembler(Sealer(), spill).take(messages):
                batches += 1
                assert sealed.raw.num_rows <= 100, f"seed {seed}"
                assert sealed.raw.nbytes <= 64 * sum(map(len, messages)), f"seed {seed}"
                encoded = encode_annotations(sealed.annotations)
                read_back = decode_annotations(encoded, sealed.raw.num_rows)
                assert read_back == tuple(sealed.annotations), f"seed {seed}"
        except (ProtocolError, DecodeError, GapError, NotStreamableError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {messages!r}") from error
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MEMORY_MAX_BYTES, f"seed {seed}"
    assert refused > rounds // 20, f"seed {seed}"
    assert batches > rounds // 20, f"seed {seed}"


def test_broken_keepalives_are_refused_or_read() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(10_000):
        message = rng.choice(BREAKS)(rng, KEEPALIVE)
        try:
            keepalive = parse_keepalive(message)
        except ProtocolError:
            continue
        assert len(message) == len(KEEPALIVE), f"seed {seed}"
        assert 0 <= keepalive.end_lsn < 2**64, f"seed {seed}"
