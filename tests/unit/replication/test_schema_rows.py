"""Schema changes as rows of the log: the same rows however the source is read and whoever dies."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor, idle_place, place_before
from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation
from cdc.decoding.table_version import TableVersion
from cdc.replication.spill.spill import Spill
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from cdc.replication.wire.table_versions import TableVersions
from tests import pgoutput
from tests.examples import examples
from tests.unit.replication.streamed import interleaved, rows, wire
from tests.unit.replication.streamed_history import Row, Server, Transaction, histories
from tests.wire_messages import transaction

ID = ("id", 23, True)
A1 = pgoutput.relation(1, "public", "a", [ID])
A2 = pgoutput.relation(1, "public", "a", [ID, ("x", 25)])
A3 = pgoutput.relation(1, "public", "a", [ID, ("y", 25)])
B1 = pgoutput.relation(2, "public", "b", [ID])
B2 = pgoutput.relation(2, "public", "b", [ID, ("x", 25)])
OWN = pgoutput.relation(9, "walbrook", "sources", [ID])
a, b, own = (pgoutput.insert(oid, ["1"]) for oid in (1, 2, 9))
STREAM = [
    *(A1, B1, OWN, *transaction(0x100, a, b, b, a)),
    *transaction(0x200, A2, a, b),
    *transaction(0x300, b, own, pgoutput.logical_message("note", b""), A3, a, A1, a, B2, b, a),
    *(pgoutput.logical_message("note", b"", transactional=False, lsn=0x400),),
    *transaction(0x400, A2, a),
    *transaction(0x500, pgoutput.truncate([2, 1, 9]), b),
]
# By hand: a number is left free before each first row of a table, and of a version, but 0.
EXPECTED = [
    (0x100, 0, "I"), (0x100, 2, "I"), (0x100, 3, "I"), (0x100, 4, "I"),
    (0x1FF, 1, "S"), (0x200, 0, "I"), (0x200, 2, "I"),
    (0x300, 0, "I"), (0x300, 3, "M"), (0x300, 4, "S"), (0x300, 5, "I"), (0x300, 6, "S"),
    (0x300, 7, "I"), (0x300, 8, "S"), (0x300, 9, "I"), (0x300, 10, "I"),
    (0x3FF, 0, "M"), (0x3FF, 1, "S"), (0x400, 0, "I"),
    (0x500, 0, "T"), (0x500, 2, "T"), (0x500, 5, "I"),
]  # fmt: skip


def numbered(batches: Iterator[Sealed] | list[Sealed]) -> list[tuple[int, int, str]]:
    return [(row.lsn, row.idx, row.kind) for row in rows(batches)]


def known(recorded: list[TableVersion], resume: Cursor) -> TableVersions:
    """As the reader loads them: the newest of each table, and what may come again."""
    newest = {version.relation.oid: version for version in recorded}
    return TableVersions(
        version
        for version in recorded
        if version.since.lsn >= resume.lsn or newest[version.relation.oid] is version
    )


def sealed_in(pieces: list[list[bytes]], sealer: Sealer) -> list[Sealed]:
    return [sealed for piece in pieces if (sealed := sealer.seal(wire(*piece))) is not None]


def test_a_schema_change_stands_directly_before_the_first_row_of_its_version() -> None:
    batches = sealed_in([STREAM], Sealer(versions=TableVersions()))
    assert numbered(batches) == EXPECTED
    changes = [orjson.loads(row.payload[1:]) for row in rows(batches) if row.kind == "S"]
    assert [(c["table"]["name"], c["version"]) for c in changes] == [
        ("a", 2), ("a", 3), ("a", 4), ("b", 2), ("a", 5),
    ]  # fmt: skip
    assert changes[0]["added"] == [{"name": "x", "type": "text"}]
    assert changes[1]["renamed"] == [{"from": "x", "to": "y"}]
    assert changes[2]["dropped"] == [{"name": "y", "type": "text"}]
    assert {row.xid for row in rows(batches) if row.kind == "S"} == {0}
    assert sum(len(batch.versions) for batch in batches) == 7


@pytest.mark.parametrize("second", [0, 3, 7])
def test_cuts_make_no_difference(second: int) -> None:
    whole = rows(sealed_in([STREAM], Sealer(versions=TableVersions())))
    for cut in range(1, len(STREAM)):
        pieces = [STREAM[:cut], STREAM[cut : cut + second], STREAM[cut + second :]]
        pieces = [piece for piece in pieces if piece]
        assert rows(sealed_in(pieces, Sealer(versions=TableVersions()))) == whole
        alone = sealed_in(pieces, Sealer())
        assert rows(alone) == [row for row in whole if row.kind != "S"], "numbers are the same"


def test_a_recorded_version_is_written_again_whatever_the_catalog_says_then() -> None:
    first = sealed_in([STREAM], Sealer(versions=TableVersions()))
    recorded = [version for batch in first for version in batch.versions]

    def columns_numbered(relation: Relation, _xid: int) -> CatalogNote:
        return CatalogNote(attnums=tuple(range(7, 7 + len(relation.columns))))

    for at, row in enumerate(rows(first)):
        resume = Cursor(row.lsn, row.idx)
        sealer = Sealer(resume, columns_numbered, versions=known(recorded, resume))
        again = sealed_in([STREAM], sealer)
        assert numbered(again) == EXPECTED[at:]
        assert [r for r in rows(again) if r.kind == "S"] == [
            r for r in rows(first)[at:] if r.kind == "S"
        ]
        assert [version for batch in again for version in batch.versions] == []


def test_rows_that_the_log_has_decide_nothing() -> None:
    old = TableVersion.first(A1, Cursor(8, 0), 0)
    sealer = Sealer(Cursor(0x200, 1), versions=TableVersions([old]))
    first, second = transaction(0x200, A2, a, a), transaction(0x300, a)
    assert numbered(sealed_in([[*first, *second]], sealer)) == [
        (0x200, 1, "I"), (0x2FF, 1, "S"), (0x300, 0, "I"),
    ]  # fmt: skip


def test_annotations_stay_with_their_rows() -> None:
    said = pgoutput.logical_message("walbrook:transaction_annotations.set", b"1")
    stream = [A1, B1, *transaction(0x100, a), *transaction(0x200, said, b, A2, a, b)]
    found = rows(sealed_in([stream], Sealer(versions=TableVersions())))
    assert [(row.idx, row.kind, row.annotation) for row in found[1:]] == [
        (0, "M", None), (2, "I", b"1"), (3, "S", None), (4, "I", b"1"), (5, "I", b"1"),
    ]  # fmt: skip


def test_the_place_before_a_row_is_ahead_of_an_idle_source() -> None:
    assert place_before(Cursor(0x200, 5)) == Cursor(0x200, 4)
    assert idle_place(0x200) < place_before(Cursor(0x200, 0)) < Cursor(0x200, 0)


def stripped(row: Row) -> Row:
    """Without the schema: what the catalog adds to it may differ from connection to connection."""
    return row._replace(schema=b"")


def received(
    data: st.DataObject, server: Server, resume: Cursor, recorded: list[TableVersion]
) -> Iterator[Sealed]:
    """What a connection that is sent the history gives, in random batches."""
    cuts = data.draw(st.lists(st.integers(0, len(server.messages)), max_size=6))
    bounds = sorted({0, len(server.messages), *cuts})
    asked = data.draw(st.booleans())

    def catalog_of(relation: Relation, _xid: int) -> CatalogNote:
        return CatalogNote(attnums=tuple(range(1, 1 + len(relation.columns)))) if asked else none

    none = CatalogNote()
    with tempfile.TemporaryDirectory() as directory:
        sealer = Sealer(resume, catalog_of, versions=known(recorded, resume))
        intake = TransactionAssembler(sealer, Spill(Path(directory) / "spill"), BatchLimits(rows=3))
        for start, end in itertools.pairwise(bounds):
            yield from intake.take(wire(*server.messages[start:end]))


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), history=histories)
def test_through_crashes_and_lost_logs_the_log_is_the_same(
    data: st.DataObject, history: list[Transaction]
) -> None:
    server = interleaved(data, history)
    log: list[Row] = []
    recorded: list[TableVersion] = []
    resume = ORIGIN
    for dies in [True] * data.draw(st.integers(0, 3)) + [False]:
        lasts = data.draw(st.integers(0, 6)) if dies else None
        for number, batch in enumerate(received(data, server, resume, recorded)):
            if number == lasts:
                # It dies before the batch is in the log, its versions recorded or not.
                recorded += batch.versions if data.draw(st.booleans()) else ()
                break
            recorded += batch.versions
            log += rows([batch])
            resume = batch.high
        if dies and data.draw(st.booleans()):
            resume = data.draw(st.sampled_from([ORIGIN, *(Cursor(r.lsn, r.idx) for r in log)]))
            log = [row for row in log if Cursor(row.lsn, row.idx) < resume]
    assert [stripped(row) for row in log] == [stripped(row) for row in server.rows]
    cursors = [(row.lsn, row.idx) for row in log]
    assert cursors == sorted(set(cursors))
