"""Transactions in pieces from real servers: what flows before the commit, and what the log gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cdc.cursor import ORIGIN, Cursor, parse_lsn
from cdc.decoding import decode_changes
from cdc.decoding.catalog import CatalogNote
from cdc.decoding.relation import Relation
from cdc.errors import GapError
from cdc.replication.options import StreamOptions
from cdc.replication.source.catalog import ask_catalog
from cdc.replication.spill.spill import NotStreamableError, Spill
from cdc.replication.stream import ReplicationStream
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from cdc.stop import StopSignal
from tests.fix_postgres import (
    DEFAULT_VERSION,
    Database,
    since,
)
from tests.stream_server import STREAMED, TWO_PHASE, annotate, fill, make_slot
from tests.stream_server import server as server
from tests.stream_server import shop as shop
from tests.unit.replication.annotated import carried
from tests.waiting import until

pytestmark = pytest.mark.migrated

WHOLE = StreamOptions()


@dataclass
class Reading:
    """A slot read into a list, as the reader would read it into the log."""

    stream: ReplicationStream
    intake: TransactionAssembler
    spill: Spill
    stop: StopSignal = field(default_factory=StopSignal)
    batches: list[Sealed] = field(default_factory=list)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Read on until ``condition`` holds."""

        def met() -> bool:
            self.stream.wait(0.02, self.stop.descriptor)
            while self._take():
                pass
            return condition()

        until(what, met)

    def _take(self) -> bool:
        messages: list[bytes] = []
        taken, keepalive = self.stream.drain(messages, bytes_max=1 << 20, rows_max=500)
        if messages:
            self.batches.extend(self.intake.take(messages))
        return bool(taken) or keepalive is not None

    def until_now(self, database: Database) -> None:
        """Read everything up to the server's present."""
        mark = database.execute("SELECT pg_logical_emit_message(false, 'mark', '')::text")[0][0]
        passed = parse_lsn(str(mark)) - 1  # the mark's last byte
        self.until("the mark", lambda: bool(self.batches) and self.batches[-1].high.lsn >= passed)

    def to(self, database: Database) -> list[dict[str, object]]:
        """The same, decoded."""
        self.until_now(database)
        return [change for change in self.changes() if change["action"] != "message"]

    def changes(self) -> list[dict[str, object]]:
        return [
            change
            for batch in self.batches
            for change in decode_changes(batch.raw, batch.schemas).to_pylist()
        ]

    def raw(self) -> list[dict[str, object]]:
        """What stands in the log, with each row's schema instead of its id, and its annotation."""
        return [
            {**row, "schema_id": batch.schemas.get(row["schema_id"]), "annotation": text}
            for batch in self.batches
            for row, text in zip(batch.raw.to_pylist(), carried(batch), strict=True)
        ]


@contextmanager
def reading(
    database: Database, slot: str, directory: Path, options: StreamOptions, resume: Cursor = ORIGIN
) -> Iterator[Reading]:
    catalog = database.connect()

    def catalog_of(relation: Relation, xid: int) -> CatalogNote:
        return ask_catalog(catalog, relation, xid)

    stream = ReplicationStream(
        database.dsn, slot=slot, publication="pub", start_lsn=resume.lsn, options=options
    )
    try:
        spill = Spill(directory / "spill")
        spill.start(resume.lsn, resume.lsn, two_phase=options.two_phase)
        yield Reading(stream, TransactionAssembler(Sealer(resume, catalog_of), spill), spill)
    finally:
        stream.close()
        catalog.close()


def ids(changes: list[dict[str, object]]) -> list[int]:
    return [int(str(c["record_pks"]).strip('[]"')) for c in changes]


def test_a_large_transaction_flows_before_its_commit(shop: Database, tmp_path: Path) -> None:
    slot = make_slot(shop, "s")
    with reading(shop, slot, tmp_path, STREAMED) as reader, shop.connect() as writer:
        with writer.transaction():
            fill(writer, 1, 2000)
            reader.until("the first rows", lambda: reader.spill.size_bytes > 0)
            some = reader.spill.size_bytes
            fill(writer, 2001, 6000)
            reader.until("more of them", lambda: reader.spill.size_bytes > 2 * some)
            assert reader.batches == []
        changes = reader.to(shop)
        assert ids(changes) == list(range(1, 6001))
        assert [c["commit_idx"] for c in changes] == list(range(6000))
        assert reader.spill.size_bytes == 0


def test_two_large_ones_side_by_side_come_in_the_order_of_their_commits(
    shop: Database, tmp_path: Path
) -> None:
    slot = make_slot(shop, "s")
    with (
        reading(shop, slot, tmp_path, STREAMED) as reader,
        shop.connect() as one,
        shop.connect() as other,
    ):
        one.execute("BEGIN")
        other.execute("BEGIN")
        for step in range(4):
            fill(one, 1000 * step + 1, 1000 * step + 500)
            fill(other, 1000 * step + 501, 1000 * step + 1000)
        reader.until("both to flow", lambda: reader.spill.transactions == 2)
        shop.execute("INSERT INTO item VALUES (9001, 'between')")
        other.execute("COMMIT")
        one.execute("COMMIT")
        changes = reader.to(shop)
    thousands = [range(1000 * step, 1000 * step + 1000) for step in range(4)]
    assert ids(changes) == [
        9001,
        *(i + 1 for hundred in thousands for i in hundred[500:]),
        *(i + 1 for hundred in thousands for i in hundred[:500]),
    ]
    cursors = [(c["commit_lsn"], c["commit_idx"]) for c in changes]
    assert cursors == sorted(cursors)


def test_a_rollback_leaves_nothing(shop: Database, tmp_path: Path) -> None:
    slot = make_slot(shop, "s")
    with reading(shop, slot, tmp_path, STREAMED) as reader, shop.connect() as writer:
        with writer.transaction(force_rollback=True):
            fill(writer, 1, 3000)
            reader.until("rows to flow", lambda: reader.spill.size_bytes > 0)
        assert reader.to(shop) == []
        assert list((tmp_path / "spill").iterdir()) == []


def test_a_table_made_in_the_transaction_gets_its_key(shop: Database, tmp_path: Path) -> None:
    slot = make_slot(shop, "s")
    with reading(shop, slot, tmp_path, STREAMED) as reader, shop.connect() as writer:
        with writer.transaction():
            writer.execute("CREATE TABLE fresh (v text, a int, PRIMARY KEY (a))")
            writer.execute("INSERT INTO fresh SELECT 'x', i FROM generate_series(1, 3000) i")
            reader.until("rows to flow", lambda: reader.spill.size_bytes > 0)
        assert ids(reader.to(shop)) == list(range(1, 3001))


def test_ddl_that_is_rolled_back_changes_nothing_for_the_others(
    shop: Database, tmp_path: Path
) -> None:
    slot = make_slot(shop, "s")
    shop.execute("CREATE TABLE other (id int PRIMARY KEY)")
    with reading(shop, slot, tmp_path, STREAMED) as reader, shop.connect() as writer:
        shop.execute("INSERT INTO item VALUES (1, 'before')")
        with writer.transaction(force_rollback=True):
            writer.execute("ALTER TABLE item ADD COLUMN extra int DEFAULT 7")
            fill(writer, 1001, 4000)
            reader.until("rows to flow", lambda: reader.spill.size_bytes > 0)
            shop.execute("INSERT INTO other VALUES (1)")
        shop.execute("INSERT INTO item VALUES (2, 'after')")
        records = [c["record"] for c in reader.to(shop)]
    assert records == ['{"id":1,"name":"before"}', '{"id":1}', '{"id":2,"name":"after"}']


def work(shop: Database) -> None:
    """Something of everything, in two sessions."""
    with shop.connect() as one, shop.connect() as other:
        one.execute("BEGIN")
        other.execute("BEGIN")
        fill(one, 1, 1500)
        fill(other, 10_001, 11_000)
        one.execute("SAVEPOINT a")
        fill(one, 2001, 3500)
        one.execute("SAVEPOINT b")
        one.execute("UPDATE item SET name = 'b' WHERE id <= 1500")
        one.execute("ROLLBACK TO b")
        one.execute("DELETE FROM item WHERE id <= 400")
        one.execute("RELEASE a")
        one.execute("SAVEPOINT c")
        one.execute("ALTER TABLE other ADD COLUMN lost int")
        one.execute("INSERT INTO other SELECT i, i FROM generate_series(1, 2000) i")
        one.execute("ROLLBACK TO c")
        fill(other, 11_001, 12_000)
        other.execute("COMMIT")
        one.execute("INSERT INTO other SELECT i FROM generate_series(1, 1000) i")
        one.execute("COMMIT")
        fill(one, 20_001, 20_010)
        one.execute("BEGIN")
        fill(one, 30_001, 31_000)
        one.execute("SELECT pg_logical_emit_message(true, 'note', 'kept')")
        one.execute("SELECT pg_logical_emit_message(true, 'walbrook.heartbeat', '1')")
        annotate(one, '{"user": "ann"}')
        one.execute("TRUNCATE item, other")
        fill(one, 1, 2000)
        one.execute("ALTER TABLE item ADD COLUMN extra int DEFAULT 7")
        annotate(one, "not JSON")
        fill(one, 40_001, 41_000)
        one.execute("COMMIT")
        for first, how in ((50_001, "COMMIT"), (60_001, "ROLLBACK"), (70_001, "COMMIT")):
            one.execute("BEGIN")
            annotate(one, f"{first}")
            fill(one, first, first + (1500 if first < 70_000 else 10))
            one.execute(f"PREPARE TRANSACTION 'g{first}'")
            fill(other, first + 5000, first + 5000)
            one.execute(f"{how} PREPARED 'g{first}'")
        fill(one, 80_001, 80_010)


def test_in_pieces_and_whole_give_the_same_log(shop: Database, tmp_path: Path) -> None:
    shop.execute("CREATE TABLE other (id int PRIMARY KEY)")
    ways = {"whole": WHOLE, "streamed": STREAMED, "two_phase": TWO_PHASE}
    if DEFAULT_VERSION < 15:
        del ways["two_phase"]
    slots = {name: make_slot(shop, name) for name in ways}
    work(shop)
    logs = {}
    for name, options in ways.items():
        with reading(shop, slots[name], tmp_path / name, options) as reader:
            reader.until_now(shop)
            # Without the marks, whose time is when they were sent.
            logs[name] = [row for row in reader.raw() if row["xid"]]
    assert len(logs["whole"]) > 11_000
    carrying = Counter(row["annotation"] for row in logs["whole"] if row["annotation"])
    assert carrying == {b'{"user": "ann"}': 2 + 2000, b"50001": 1501, b"70001": 11}
    assert all(log == logs["whole"] for log in logs.values())
    assert (tmp_path / "streamed" / "spill").exists()


def test_a_message_in_a_rolled_back_savepoint_asks_for_the_whole_transaction(
    shop: Database, tmp_path: Path
) -> None:
    slot = make_slot(shop, "s")
    with shop.connect() as writer, writer.transaction():
        fill(writer, 1, 1000)
        with writer.transaction(force_rollback=True):
            writer.execute("SELECT pg_logical_emit_message(true, 'note', 'undone')")
            fill(writer, 1001, 2000)
        writer.execute("SELECT pg_logical_emit_message(true, 'note', 'kept')")
    with (
        reading(shop, slot, tmp_path, STREAMED) as reader,
        pytest.raises(NotStreamableError, match="do not say"),
    ):
        reader.to(shop)
    with reading(shop, slot, tmp_path, WHOLE) as reader:
        reader.to(shop)
        notes = [c["record"] for c in reader.changes() if '"note"' in str(c["record"])]
    assert len(notes) == 1
    assert "kept" in str(notes[0])


def confirm(reader: Reading, database: Database, slot: str, lsn: int) -> None:
    """Let the server forget everything below ``lsn``, and wait until it has."""

    def confirmed() -> bool:
        rows = database.execute(
            f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'"
        )
        return parse_lsn(str(rows[0][0])) >= lsn

    reader.stream.confirm(received_lsn=lsn, confirmed_lsn=lsn, reply_requested=False)
    until("the slot to move", confirmed)


@since(15)
@pytest.mark.parametrize("rows", [10, 3000], ids=["whole", "streamed"])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_a_restart_between_prepare_and_its_end_loses_nothing(
    shop: Database, tmp_path: Path, rows: int, end: str
) -> None:
    slot = make_slot(shop, "s")
    gid = f"{shop.name} order"
    with reading(shop, slot, tmp_path, TWO_PHASE) as reader, shop.connect() as writer:
        writer.execute("BEGIN")
        fill(writer, 1, rows)
        writer.execute(f"PREPARE TRANSACTION '{gid}'")
        assert reader.to(shop) == []
        passed = reader.batches[-1].high
        reader.spill.secure(passed.lsn, passed.lsn)
        # From here on the server does not send the rows again.
        confirm(reader, shop, slot, passed.lsn)
    shop.execute(f"{end} PREPARED '{gid}'")
    with reading(shop, slot, tmp_path, TWO_PHASE, resume=passed) as reader:
        assert ids(reader.to(shop)) == (list(range(1, rows + 1)) if end == "COMMIT" else [])
        last = reader.batches[-1].high
        reader.spill.settled(last)
        reader.spill.secure(last.lsn, last.lsn)
        assert list((tmp_path / "spill").glob("*.rows")) == []


@since(15)
def test_prepared_rows_that_were_lost_are_a_gap_and_said_to_be(
    shop: Database, tmp_path: Path
) -> None:
    slot = make_slot(shop, "s")
    gid = f"{shop.name} order"
    with reading(shop, slot, tmp_path / "old", TWO_PHASE) as reader, shop.connect() as writer:
        writer.execute("BEGIN")
        fill(writer, 1, 10)
        writer.execute(f"PREPARE TRANSACTION '{gid}'")
        reader.to(shop)
        passed = reader.batches[-1].high
        confirm(reader, shop, slot, passed.lsn)
    shop.execute(f"COMMIT PREPARED '{gid}'")
    with (
        reading(shop, slot, tmp_path / "new", TWO_PHASE, resume=passed) as reader,
        pytest.raises(GapError, match="are not in") as caught,
    ):
        reader.to(shop)
    assert caught.value.kind == "prepared_missing"


@since(15)
def test_a_two_phase_slot_sends_prepared_transactions_unasked(
    shop: Database, tmp_path: Path
) -> None:
    slot, gid = f"{shop.name}_s", f"{shop.name} order"
    shop.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)")
    with reading(shop, slot, tmp_path, WHOLE) as reader, shop.connect() as writer:
        writer.execute("BEGIN")
        fill(writer, 1, 10)
        writer.execute(f"PREPARE TRANSACTION '{gid}'")
        reader.until("the prepare", lambda: reader.spill.transactions == 1)
        writer.execute(f"COMMIT PREPARED '{gid}'")
        assert ids(reader.to(shop)) == list(range(1, 11))


@since(16)
def test_changes_of_another_origin_are_left_out_on_request(shop: Database, tmp_path: Path) -> None:
    slots = {name: make_slot(shop, name) for name in ("any", "none")}
    origin = f"{shop.name}_elsewhere"
    with shop.connect() as writer:
        writer.execute("SELECT pg_replication_origin_create(%s)", [origin])
        writer.execute("SELECT pg_replication_origin_session_setup(%s)", [origin])
        fill(writer, 1, 3)
        writer.execute("SELECT pg_replication_origin_session_reset()")
        fill(writer, 4, 5)
        writer.execute("SELECT pg_replication_origin_drop(%s)", [origin])
    with reading(shop, slots["any"], tmp_path, StreamOptions(origin="any")) as reader:
        assert ids(reader.to(shop)) == [1, 2, 3, 4, 5]
    with reading(shop, slots["none"], tmp_path, StreamOptions(origin="none")) as reader:
        assert ids(reader.to(shop)) == [4, 5]
