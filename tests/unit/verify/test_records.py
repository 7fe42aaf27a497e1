"""What messages leave of rows, and when a record equals the source's."""

from __future__ import annotations

import random

import pyarrow as pa

from cdc.verify.held import HELD_SCHEMA
from cdc.verify.records import HeldRow, _keep, _Message, held_by_key, same_record


def _batch(*rows: tuple[str | None, bytes | None, int, int, str | None]) -> pa.RecordBatch:
    arrays = [
        pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), HELD_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=HELD_SCHEMA)


def test_messages_are_applied_in_the_order_of_their_places() -> None:
    held = held_by_key(
        [
            _batch(('["1"]', b"new", 20, 1, None), ('["2"]', None, 20, 2, None)),
            _batch(('["1"]', b"old", 20, 0, None), ('["2"]', b"x", 10, 0, None)),
            _batch((None, None, 15, 0, None), ('["3"]', b"before", 14, 0, None)),
        ]
    )
    assert held == {("1",): HeldRow(b"new")}


def test_of_a_key_nothing_before_its_last_complete_message_is_kept() -> None:
    kept: list[_Message] = []
    for number in range(100):
        _keep(kept, _Message((number, 0), b"{}", None))
        _keep(kept, _Message((number, 1), b"{}", '["big"]'))
    assert [message.place for message in kept] == [(99, 0), (99, 1)]
    _keep(kept, _Message((50, 0), b"late", None))
    assert [message.place for message in kept] == [(99, 0), (99, 1)]


def test_messages_in_any_order_leave_the_same_rows() -> None:
    chance = random.Random(3)
    messages: list[tuple[str | None, bytes | None, int, int, str | None]] = []
    for lsn in range(60):
        key = f'["{chance.randrange(3)}"]'
        messages.append(chance.choice([
            (key, b'{"n":%d,"big":%d}' % (lsn, lsn), lsn, 0, None),
            (key, b'{"n":%d}' % lsn, lsn, 0, '["big"]'),
            (key, None, lsn, 0, None),
            (None, None, lsn, 0, None) if lsn == 30 else (key, b"{}", lsn, 0, '["big", "n"]'),
        ]))  # fmt: skip
    wanted = held_by_key([_batch(*messages)])
    for _ in range(50):
        chance.shuffle(messages)
        assert held_by_key([_batch(each) for each in messages]) == wanted


def test_values_that_a_message_lacks_come_from_the_one_before_it() -> None:
    held = held_by_key(
        [
            _batch(
                ('["1"]', b'{"id":1,"n":1,"big":"b"}', 1, 0, None),
                ('["1"]', b'{"id":1,"n":2}', 2, 0, '["big"]'),
                ('["2"]', b'{"id":2,"n":2}', 3, 0, '["big"]'),
            )
        ]
    )
    assert same_record(b'{"id":1,"n":2,"big":"b"}', held[("1",)])
    assert not same_record(b'{"id":1,"n":2,"big":"c"}', held[("1",)])
    assert same_record(b'{"id":2,"n":2,"big":"never sent"}', held[("2",)])
    assert not same_record(b'{"id":2,"n":3,"big":"never sent"}', held[("2",)])


def test_columns_added_and_dropped_since_do_not_differ_by_themselves() -> None:
    there = HeldRow(b'{"id":1,"dropped":5}')
    assert same_record(b'{"id":1,"added":null}', there)
    assert not same_record(b'{"id":1,"added":0}', there)


def test_numbers_are_compared_with_every_digit() -> None:
    assert not same_record(b'{"n":1.0000000000000000001}', HeldRow(b'{"n":1.0}'))
    assert not same_record(b'{"n":1}', HeldRow(b'{"n":"1"}'))
