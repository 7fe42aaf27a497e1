"""What operators do by SQL: each act does what it says, each refusal says why and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from cdc.config import SinkConfig
from cdc.connection import Connection
from cdc.cursor import Cursor
from cdc.generation import Generation
from cdc.service.process.prepare import described
from cdc.state.consumers import Described
from cdc.state.migrate import migrate
from cdc.state.positions import MovedError, Settlement, register_source, settle
from tests.fix_postgres import Database, on_both_versions

pytestmark = [pytest.mark.migrated, on_both_versions]

_SOURCE = """
UPDATE walbrook.sources
   SET earliest_lsn = '0/100', earliest_idx = 0, log_lsn = '0/900', log_idx = 3;
UPDATE walbrook.consumers SET cursor_lsn = '0/500', cursor_idx = 0;
INSERT INTO walbrook.log_segments
       (source, first_batch, batches, rows, bytes, first_lsn, first_idx, high_lsn, high_idx,
        commit_from, commit_to, sealed_at, tier, location)
SELECT 'shop', s.batch, 1, 1, 1, s.first, s.first_idx, s.high, s.high_idx, s.first_at, s.last_at,
       now(), 'hot', ''
  FROM (VALUES
       (0, '0/100'::pg_lsn, 0, '0/200'::pg_lsn, 1, '2026-01-01 10:00Z'::timestamptz,
        '2026-01-01 11:00Z'::timestamptz),
       (1, '0/300', 2, '0/400', 1, '2026-01-01 11:30Z', '2026-01-01 12:00Z'),
       (2, '0/600', 0, '0/900', 3, '2026-01-01 13:00Z', '2026-01-01 14:00Z')
       ) AS s (batch, first, first_idx, high, high_idx, first_at, last_at);
"""
_WAITING = """
INSERT INTO walbrook.events
       (consumer, commit_lsn, commit_idx, group_id, whole_table, due_at, deliveries, error,
        commit_timestamp, xid, table_schema, table_name, action, record, record_pks)
SELECT c.id, %(lsn)s::pg_lsn, %(idx)s, %(group)s, %(whole)s, %(due)s::timestamptz, 3, 'refused',
       '2026-01-01', 7, 'public', 'item', 'insert', '{"id": 1, "n": 1.50}', '["1"]'
  FROM walbrook.consumers c WHERE c.name = %(consumer)s
"""
_LETTER = """
INSERT INTO walbrook.dead_letters
       (source, consumer, commit_lsn, commit_idx, commit_timestamp, table_schema, table_name,
        action, kind, error, payload, event, deliveries)
SELECT 'shop', %(consumer)s, %(lsn)s::pg_lsn, %(idx)s, '2026-01-01', 'public', 'item', 'insert',
       %(kind)s, 'it was refused', CASE WHEN %(event)s::json IS NULL THEN '\\x00'::bytea END,
       %(event)s::json, 3
RETURNING id
"""

_MANY = """
INSERT INTO walbrook.events
       (consumer, commit_lsn, commit_idx, group_id, due_at, commit_timestamp, xid, table_schema,
        table_name, action, record, record_pks)
SELECT c.id, '0/1000'::pg_lsn + n, 0, n % 10000, CASE WHEN n <= 10000 THEN now() END, now(), 1,
       'public', 'item', 'insert', '{}', '[]'
  FROM walbrook.consumers c, generate_series(1, 50000) n WHERE c.name = 'hook'
"""


# A table with a key, one without, and one whose key came later.
_VERSIONS = """
INSERT INTO walbrook.schema_versions
       (source, relation, version, table_schema, table_name, columns, replica_identity, key, schema,
        since_lsn, since_idx, commit_timestamp)
VALUES ('shop', 1, 1, 'public', 'item', '[{}, {}]', 'full', '{id}', '', '0/100', 0, now()),
       ('shop', 2, 1, 'public', 'log', '[{}]', 'full', '{line}', '', '0/300', 0, now()),
       ('shop', 3, 1, 'public', 'plain', '[{}]', 'default', '{id}', '', '0/100', 0, now())
"""
_WITH_A_KEY = """
INSERT INTO walbrook.schema_versions
       (source, relation, version, table_schema, table_name, columns, replica_identity, key, change,
        schema, since_lsn, since_idx, commit_timestamp, announced_lsn, announced_idx)
VALUES ('shop', 2, 2, 'public', 'log', '[{}, {}]', 'default', '{id}', '{}', '', '0/400', 1, now(),
        '0/400', 0)
"""
WAYS = ("new_generation", "truncate")


class Operator:
    """A state database with a source, two webhooks, a file sink, and an operator's connection."""

    def __init__(self, database: Database, connection: Connection) -> None:
        self.database, self.connection = database, connection
        migrate(connection)
        kinds = {
            "hook": "webhook",
            "other": "webhook",
            "files": "file",
            "streams": "redis_stream",
            "once": "kafka_exactly_once",
            "topics": "kafka",
        }
        self.term = register_source(
            connection,
            name="shop",
            slot="slot",
            publication="pub",
            system_identifier="1",
            slot_lsn=0x100,
            consumers=list(kinds),
            described={
                name: Described(kind, rewind_ways=WAYS if kind != "webhook" else ())
                for name, kind in kinds.items()
            },
        )
        connection.execute(_SOURCE)

    def act(self, call: str) -> dict[str, Any]:
        rows = self.connection.cursor(row_factory=dict_row)
        (row,) = rows.execute(f"SELECT * FROM walbrook.{call}".encode()).fetchall()
        return row

    def refused(self, call: str) -> tuple[str, str]:
        """What a call says that is refused, and its hint."""
        with pytest.raises(psycopg.Error) as caught:
            self.act(call)
        return str(caught.value.diag.message_primary), str(caught.value.diag.message_hint)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query.encode()).fetchall()

    def waits(
        self,
        lsn: str,
        idx: int = 0,
        group: int | None = None,
        due: str | None = None,
        whole: bool = False,
        consumer: str = "hook",
    ) -> None:
        named = {"lsn": lsn, "idx": idx, "group": group, "due": due, "whole": whole}
        self.connection.execute(_WAITING, {**named, "consumer": consumer})

    def dies(self, lsn: str, idx: int = 0, consumer: str = "hook") -> int:
        """The message that waits at this cursor becomes a dead letter."""
        ((event,),) = self.rows(
            f"DELETE FROM walbrook.events e USING walbrook.consumers c WHERE c.id = e.consumer"
            f" AND c.name = '{consumer}' AND (commit_lsn, commit_idx) = ('{lsn}', {idx})"
            " RETURNING row_to_json(e)"
        )
        return self.letter(lsn, idx, "delivery", json.dumps(event), consumer)

    def letter(
        self, lsn: str, idx: int, kind: str, event: str | None = None, consumer: str = "hook"
    ) -> int:
        named = {"lsn": lsn, "idx": idx, "kind": kind, "event": event, "consumer": consumer}
        row = self.connection.execute(_LETTER, named).fetchone()
        assert row is not None
        return int(str(row[0]))

    def queue(self, consumer: str = "hook") -> list[tuple[str, int, bool]]:
        """The cursors that wait, and whether each is due."""
        return self.rows(
            "SELECT commit_lsn::text, commit_idx::int, coalesce(due_at <= clock_timestamp(), false)"
            "  FROM walbrook.events e JOIN walbrook.consumers c ON c.id = e.consumer"
            f" WHERE c.name = '{consumer}' ORDER BY commit_lsn, commit_idx"
        )

    def gaps(self) -> list[tuple[str, str, str]]:
        return self.rows(
            "SELECT consumer, from_lsn || ':' || from_idx, to_lsn || ':' || to_idx"
            "  FROM walbrook.gaps WHERE reason = 'discarded' AND told_at IS NULL ORDER BY id"
        )


@pytest.fixture
def operator(database: Database) -> Iterator[Operator]:
    with database.connect() as connection:
        yield Operator(database, connection)


def test_a_consumer_is_paused_and_resumed_and_doing_it_twice_changes_nothing(
    operator: Operator,
) -> None:
    first = operator.act("pause('hook')")
    assert (first["source"], first["consumer"], first["cursor"]) == ("shop", "hook", "0/500:0")
    assert operator.act("pause('hook')")["paused_at"] == first["paused_at"] is not None
    ((id_, paused),) = operator.rows(
        "SELECT id, walbrook.is_paused(id) FROM walbrook.consumers WHERE name = 'hook'"
    )
    assert paused
    for _ in range(2):
        assert operator.act("resume('hook')")["paused_at"] is None
    assert operator.rows(f"SELECT walbrook.is_paused({id_})") == [(False,)]


def test_a_resumed_consumer_no_longer_says_that_it_is_paused(operator: Operator) -> None:
    operator.rows("UPDATE walbrook.consumers SET state_reason = 'it is behind' RETURNING 1")
    assert operator.act("resume('hook')")["state_reason"] == "it is behind", "it was not paused"
    operator.act("pause('hook')")
    operator.rows("UPDATE walbrook.consumers SET state_reason = 'it is paused' RETURNING 1")
    assert operator.act("resume('hook')")["state_reason"] is None


def test_every_act_is_told_to_whoever_listens(operator: Operator) -> None:
    with operator.database.connect() as listener:
        listener.execute("LISTEN walbrook")
        operator.waits("0/200", due="2026-01-01")
        for call in ("pause('hook')", "resume('hook')", "rewind('hook', '0/300:0')",
                     "discard('hook', '0/200:0')", "discard_all('hook')", "redeliver('hook')",
                     "discard('hook')"):  # fmt: skip
            operator.act(call)
        told = [json.loads(note.payload) for note in listener.notifies(timeout=5, stop_after=7)]
    assert [note["action"] for note in told] == [
        "pause", "resume", "rewind", "discard", "discard_all", "redeliver", "discard",
    ]  # fmt: skip
    assert {(note["source"], note["consumer"]) for note in told} == {("shop", "hook")}


@pytest.mark.parametrize(
    "call",
    ["pause({})", "resume({})", "rewind({}, '0/300:0')", "discard_all({})", "redeliver({})",
     "discard({})", "discard({}, '0/300:0')"],
)  # fmt: skip
def test_a_name_that_is_unknown_ambiguous_or_retired_is_refused_with_what_there_is(
    operator: Operator, call: str
) -> None:
    what, hint = operator.refused(call.format("'nobody'"))
    assert (what, hint) == (
        "there is no consumer nobody", "there are: files, hook, once, other, streams, topics",
    )  # fmt: skip
    operator.connection.execute("UPDATE walbrook.consumers SET active = false WHERE name = 'other'")
    what, hint = operator.refused(call.format("'other'"))
    assert what == "consumer other is not active: the configuration does not name it"
    assert "add it to the configuration again" in hint
    register_source(
        operator.connection,
        name="crm",
        slot="slot",
        publication="pub",
        system_identifier="1",
        slot_lsn=0x100,
        consumers=["hook"],
    )
    what, _ = operator.refused(call.format("'hook'"))
    assert what == "consumer hook is ambiguous: the sources crm, shop have one each"


@pytest.mark.parametrize(
    ("target", "reached"),
    [
        ("to_cursor => '0/300:7'", "0/300:7"),
        ("to_cursor => '0/500:0'", "0/500:0"),
        ("to_earliest => true", "0/100:0"),
        ("to_time => '2026-01-01 10:00Z'", "0/100:0"),
        ("to_time => '2026-01-01 11:10Z'", "0/300:2"),
        ("to_time => '2026-01-01 12:00Z'", "0/300:2"),
    ],
)
def test_a_rewind_goes_to_a_cursor_to_a_time_or_to_the_first_change(
    operator: Operator, target: str, reached: str
) -> None:
    assert operator.act(f"rewind('hook', {target})")["cursor"] == reached
    assert operator.act("resume('other')")["cursor"] == "0/500:0", "others stay where they are"


@pytest.mark.parametrize(
    ("target", "says", "hints"),
    [
        ("", "it is not clear where hook is to go", "give one of"),
        (", '0/300:0', to_earliest => true", "it is not clear where", "give one of"),
        (", '0/300'", "'0/300' is not a cursor", "such as 16/B374D848:3"),
        (", 'x/300:1'", "'x/300:1' is not a cursor", "LSN:index"),
        (", '0/F0:9'", "no longer has 0/F0:9: it begins at 0/100:0", "to_earliest => true"),
        (", '0/900:4'", "beyond the end of the change log of shop, which is 0/900:3", "cursors"),
        (", '0/500:1'", "hook stands at 0/500:0, which is before 0/500:1", "walbrook.discard_all"),
        (", to_time => '2026-01-01 9:00Z'", "holds nothing from before 2026-01-01", "to_earliest"),
        (", to_time => '2027-01-01'", "ends with a change of 2026-01-01", "an earlier time"),
        (", to_time => '2026-01-01 13:30Z'", "which is before 0/600:0", "walbrook.discard_all"),
    ],
)
def test_a_rewind_that_cannot_be_is_refused(
    operator: Operator, target: str, says: str, hints: str
) -> None:
    what, hint = operator.refused(f"rewind('hook'{target})")
    assert says in what
    assert hints in hint


@pytest.mark.parametrize("consumer", ["files", "streams", "once"])
@pytest.mark.parametrize("said", ["", ", destination => 'elsewhere'"])
def test_a_rewind_that_the_destination_would_absorb_is_refused_with_the_two_ways(
    operator: Operator, consumer: str, said: str
) -> None:
    what, hint = operator.refused(f"rewind('{consumer}', '0/300:2'{said})")
    assert "keeps a position of its own" in what
    assert "destination => 'new_generation'" in hint
    assert "destination => 'truncate'" in hint


def test_a_rewind_of_a_mirror_over_changes_of_a_table_without_a_key_is_refused(
    operator: Operator,
) -> None:
    given: dict[str, dict[str, Any]] = {
        "mirror": {},
        "others": {"source": {"exclude_tables": ["public.log"]}},
        "items": {"source": {"include_tables": ["public.item"]}},
        "history": {"destination": {"mode": "append"}},
    }
    destination = {"type": "postgres", "url": "postgres://localhost/copy"}
    sinks = [
        SinkConfig.model_validate(
            {"name": name, "database": "shop", **more,
             "destination": destination | more.get("destination", {})}
        )
        for name, more in given.items()
    ]  # fmt: skip
    register_source(
        operator.connection, name="shop", slot="slot", publication="pub", system_identifier="1",
        slot_lsn=0x100, consumers=list(given),
        described={each.name: described(each) for each in sinks},
    )  # fmt: skip
    operator.connection.execute(_SOURCE.partition("INSERT")[0].encode())
    operator.connection.execute(_VERSIONS)

    for place in ("0/350:0", "0/200:0"):
        what, hint = operator.refused(f"rewind('mirror', '{place}')")
        assert what.endswith("of a table without a key, which cannot be repeated: public.log")
        assert "source.exclude_tables" in hint
        for name in ("others", "items", "history"):
            assert operator.act(f"rewind('{name}', '{place}')")["cursor"] == place
    assert operator.act("rewind('mirror', '0/500:0')")["cursor"] == "0/500:0", "nothing comes again"
    operator.connection.execute(_WITH_A_KEY)
    operator.refused("rewind('mirror', '0/350:0')")
    assert operator.act("rewind('mirror', '0/450:0')")["cursor"] == "0/450:0"


def test_a_rewind_counts_the_places_and_how_often_each_was_emptied(operator: Operator) -> None:
    numbers = "SELECT generation, truncation FROM walbrook.consumers WHERE name = 'files'"
    for way, found in (
        ("truncate", (1, 1)),
        ("truncate", (1, 2)),
        ("new_generation", (2, 0)),
        ("truncate", (2, 1)),
    ):
        operator.rows(
            "UPDATE walbrook.consumers SET top_lsn = '0/500', top_idx = 0, lost_at = now()"
            " WHERE name = 'files' RETURNING 1"
        )
        # To where it stands: the destination alone is begun again.
        state = operator.act(f"rewind('files', '0/500:0', destination => '{way}')")
        assert (state["cursor"], state["generation"]) == ("0/500:0", found[0])
        assert operator.rows(numbers) == [found]
        lost = "SELECT top_lsn, top_idx, lost_at FROM walbrook.consumers WHERE name = 'files'"
        assert operator.rows(lost) == [(None, None, None)]
    assert operator.act("rewind('files', '0/300:2', destination => 'truncate')")["cursor"] == (
        "0/300:2"
    )


def test_a_destination_without_a_position_has_nothing_to_be_done_with(operator: Operator) -> None:
    what, hint = operator.refused("rewind('hook', '0/300:2', destination => 'truncate')")
    assert "gets everything again as it is" in what
    assert hint == "leave destination out"


def test_what_was_delivered_to_an_earlier_generation_is_not_settled(operator: Operator) -> None:
    before = Settlement(Cursor(0x500, 0), Cursor(0x600, 0), generation=Generation(1, 0))
    operator.act("rewind('files', '0/500:0', destination => 'new_generation')")
    for settlement, settles in (
        (before, False),
        (replace(before, generation=Generation(2, 0)), True),
    ):
        with nullcontext() if settles else pytest.raises(MovedError):
            settle(
                operator.connection,
                source="shop",
                term=operator.term,
                read_to=Cursor(0x600, 0),
                consumers={"files": settlement},
            )


def test_what_waits_and_comes_again_is_taken_out_of_the_queue(operator: Operator) -> None:
    for lsn in ("0/200", "0/300", "0/400"):
        operator.waits(lsn, idx=1, due="2026-01-01")
    operator.waits("0/400", idx=1, due="2026-01-01", consumer="other")
    state = operator.act("rewind('hook', '0/300:1')")
    assert (state["affected"], state["waiting"]) == (2, 1)
    assert operator.queue() == [("0/200", 1, True)]
    assert operator.queue("other") == [("0/400", 1, True)]


def test_what_a_micro_batch_under_way_settles_after_a_rewind_is_refused(operator: Operator) -> None:
    operator.act("rewind('hook', '0/300:0')")
    with pytest.raises(MovedError):
        settle(
            operator.connection,
            source="shop",
            term=operator.term,
            read_to=Cursor(0x900, 3),
            consumers={"hook": Settlement(Cursor(0x500, 0), Cursor(0x600, 0))},
        )
    assert operator.act("pause('hook')")["cursor"] == "0/300:0"


def test_all_is_given_up_and_the_gap_says_so(operator: Operator) -> None:
    operator.waits("0/200", idx=1, due="2026-01-01")
    state = operator.act("discard_all('hook')")
    assert (state["cursor"], state["affected"], state["waiting"]) == ("0/900:3", 1, 0)
    assert operator.gaps() == [("hook", "0/200:1", "0/900:3")]
    assert operator.act("discard_all('hook')")["cursor"] == "0/900:3"
    assert len(operator.gaps()) == 1, "there was nothing left to give up"


def test_a_consumer_beyond_the_reported_end_gives_up_its_queue_and_stays(
    operator: Operator,
) -> None:
    operator.connection.execute("UPDATE walbrook.consumers SET cursor_lsn = '0/A00'")
    operator.waits("0/200", due="2026-01-01")
    assert operator.act("discard_all('hook')")["cursor"] == "0/A00:0"
    assert operator.gaps() == [("hook", "0/200:0", "0/A00:0")]


def test_what_was_given_up_and_is_delivered_after_all_is_no_gap_any_more(
    operator: Operator,
) -> None:
    operator.act("discard_all('hook')")
    operator.act("rewind('hook', '0/600:0')")
    assert operator.gaps() == [("hook", "0/500:0", "0/600:0")]
    operator.act("rewind('hook', '0/500:0')")
    assert operator.gaps() == []


def test_a_dead_letter_goes_back_before_the_others_of_its_group_and_is_due_at_once(
    operator: Operator,
) -> None:
    operator.waits("0/200", group=1, due="2026-01-01")
    operator.waits("0/210", group=2, due="2026-01-01")
    operator.connection.execute("UPDATE walbrook.events SET lease_id = 7, holder = 'gone'")
    number = operator.dies("0/200")
    operator.connection.execute("UPDATE walbrook.events SET lease_id = NULL")
    operator.waits("0/300", group=1, due="2026-01-01")
    state = operator.act(f"redeliver({number})")
    assert (state["affected"], state["waiting"], state["dead_letters"]) == (1, 3, 0)
    assert operator.queue() == [("0/200", 0, True), ("0/210", 0, True), ("0/300", 0, False)]
    ((record, deliveries, lease, error),) = operator.rows(
        "SELECT record, deliveries, lease_id, error FROM walbrook.events WHERE commit_lsn = '0/200'"
    )
    assert (record, deliveries, lease, error) == ('{"id": 1, "n": 1.50}', 0, None, None)


def test_all_dead_letters_of_a_consumer_go_back_and_those_that_never_were_messages_stay(
    operator: Operator,
) -> None:
    for lsn in ("0/200", "0/210"):
        operator.waits(lsn, group=1)
        operator.dies(lsn)
    operator.letter("0/220", 0, "decode")
    operator.waits("0/200", consumer="other")
    operator.dies("0/200", consumer="other")
    told: list[str | None] = []
    operator.connection.add_notice_handler(lambda notice: told.append(notice.message_primary))
    state = operator.act("redeliver('hook')")
    assert (state["affected"], state["dead_letters"]) == (2, 1)
    assert told == ["1 dead letters of hook never were messages and stay"]
    assert operator.queue() == [("0/200", 0, True), ("0/210", 0, False)]
    assert operator.queue("other") == []
    assert operator.act("redeliver('other')")["affected"] == 1
    assert operator.act("redeliver('other')")["affected"] == 0


@pytest.mark.parametrize(
    ("kind", "hints"),
    [
        ("decode", "correct the row in the source"),
        ("expression", "correct the expression, start the service, and walbrook.rewind"),
        ("delivery", "walbrook.rewind('hook', '0/200:4')"),
    ],
)
def test_what_never_was_a_message_cannot_be_sent_again(
    operator: Operator, kind: str, hints: str
) -> None:
    number = operator.letter("0/200", 4, kind)
    for call in (f"redeliver({number})", "redeliver('hook')"):
        what, hint = operator.refused(call)
        assert what == f"dead letter {number} of hook never was a message ({kind})"
        assert hints in hint
        assert f"walbrook.discard({number})" in hint


def test_a_dead_letter_that_cannot_arrive_is_refused(operator: Operator) -> None:
    operator.waits("0/200", consumer="files")
    number = operator.dies("0/200", consumer="files")
    for kind in ("delta", "iceberg", "file"):
        operator.connection.execute("UPDATE walbrook.consumers SET destination = %s", (kind,))
        for call in (f"redeliver({number})", "redeliver('files')"):
            what, hint = operator.refused(call)
            assert "holds messages in the order of their cursors" in what
            assert f"walbrook.discard({number})" in hint
    operator.connection.execute("DELETE FROM walbrook.consumers WHERE name = 'files'")
    what, hint = operator.refused(f"redeliver({number})")
    assert "there is no consumer files any more" in what
    assert operator.act(f"discard({number})")["affected"] == 1, "it can be acknowledged"


def test_a_dead_letter_of_a_sink_without_a_queue_comes_again_by_a_rewind(
    operator: Operator,
) -> None:
    operator.waits("0/300", consumer="topics")
    number = operator.dies("0/300", consumer="topics")
    what, hint = operator.refused(f"redeliver({number})")
    assert "has no queue" in what
    assert "walbrook.rewind('topics'" in hint


def test_dead_letters_are_acknowledged_one_by_one_or_all(operator: Operator) -> None:
    numbers = [operator.letter(f"0/2{n}0", 0, "decode") for n in range(3)]
    state = operator.act(f"discard({numbers[0]}, 'hook')")
    assert (state["affected"], state["dead_letters"]) == (1, 2)
    assert operator.act("discard('hook')")["affected"] == 2
    assert operator.act("discard('hook')")["affected"] == 0
    what, hint = operator.refused(f"discard({numbers[0]})")
    assert what == f"there is no dead letter {numbers[0]}"
    assert "walbrook.dead_letters" in hint
    other = operator.letter("0/200", 0, "decode", consumer="other")
    assert (
        operator.refused(f"redeliver({other}, 'hook')")[0]
        == f"there is no dead letter {other} of hook"
    )


def test_one_message_that_waits_is_given_up_and_its_group_goes_on(operator: Operator) -> None:
    operator.waits("0/200", idx=1, group=1, due="2099-01-01")
    operator.waits("0/200", idx=2, group=1)
    operator.waits("0/200", idx=3, group=1)
    operator.waits("0/210", group=2, due="2099-01-01")
    operator.waits("0/220", group=2)
    state = operator.act("discard('hook', '0/200:1')")
    assert (state["affected"], state["waiting"]) == (1, 4)
    assert operator.queue() == [
        ("0/200", 2, True), ("0/200", 3, False), ("0/210", 0, False), ("0/220", 0, False),
    ]  # fmt: skip
    assert operator.gaps() == [("hook", "0/200:1", "0/200:2")]
    what, hint = operator.refused("discard('hook', '0/200:1')")
    assert what == "no message of hook waits at 0/200:1"
    assert operator.rows(hint.split(": ", 1)[1])


def test_a_message_that_concerns_a_whole_table_waits_for_all_of_it_and_holds_all_of_it(
    operator: Operator,
) -> None:
    operator.waits("0/200", group=1, due="2026-01-01")
    operator.waits("0/210", group=2, due="2026-01-01")
    operator.waits("0/220", whole=True)
    operator.waits("0/230", group=3)
    operator.act("discard('hook', '0/200:0')")
    assert operator.queue()[1:] == [("0/220", 0, False), ("0/230", 0, False)]
    operator.act("discard('hook', '0/210:0')")
    assert operator.queue() == [("0/220", 0, True), ("0/230", 0, False)]
    operator.act("discard('hook', '0/220:0')")
    assert operator.queue() == [("0/230", 0, True)]


def test_in_a_long_queue_the_first_of_each_group_is_due_and_no_other(
    operator: Operator,
) -> None:
    operator.connection.execute(_MANY)
    operator.connection.execute("ANALYZE walbrook.events")
    first, second = operator.rows(
        "SELECT commit_lsn::text FROM walbrook.events ORDER BY commit_lsn LIMIT 2"
    )
    number = operator.dies(second[0])
    for call, waiting in (
        (f"discard('hook', '{first[0]}:0')", 49_998),
        (f"redeliver({number})", 49_999),
    ):
        assert operator.act(call)["waiting"] == 10_000, "or more"
        assert operator.rows("SELECT count(*) FROM walbrook.events") == [(waiting,)]
    ((due,),) = operator.rows("SELECT count(*) FROM walbrook.events WHERE due_at IS NOT NULL")
    assert due == 10_000, "of each group the first"
