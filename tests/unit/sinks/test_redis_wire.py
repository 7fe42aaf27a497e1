"""The bytes of a Redis transaction and of its answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks import redis_wire
from sinks.redis_wire import TransactionReply, encode, is_answer, read_outcome, usual_answer
from tests.conformance.messages import batch

ADDED = b"$13\r\n96000001000-1\r\n"
THERE = b"-ERR The ID specified in XADD is equal or smaller than the target stream top item\r\n"
OOM = b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
WRONGTYPE = b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"


def _receive(data: bytes, cuts: list[int] | None = None) -> Callable[[], bytes]:
    edges = [0, *sorted({cut % len(data) for cut in cuts or []} - {0}), len(data)]
    parts = iter([data[a:b] for a, b in pairwise(edges)])
    return lambda: next(parts)


def _executed(*answers: bytes) -> bytes:
    count = len(answers)
    return b"+OK\r\n" + b"+QUEUED\r\n" * count + b"*%d\r\n" % count + b"".join(answers)


def _parsed(data: bytes) -> list[list[bytes]]:
    """Commands on the wire, read by the protocol's rules."""
    commands, at = [], 0
    while at < len(data):
        head = re.compile(rb"\*(\d+)\r\n").match(data, at)
        assert head
        at, command = head.end(), []
        for _ in range(int(head[1])):
            bulk = re.compile(rb"\$(\d+)\r\n").match(data, at)
            assert bulk
            end = bulk.end() + int(bulk[1])
            command.append(data[bulk.end() : end])
            assert data[end : end + 2] == b"\r\n"
            at = end + 2
        commands.append(command)
    return commands


def test_a_request_is_one_transaction_of_one_command_a_message() -> None:
    some = batch(0, 30).slice(4, 20)
    sent = b"".join(bytes(memoryview(part)) for part in encode("ključ", some))
    begin, *adds, end = _parsed(sent)
    assert (begin, end) == ([b"MULTI"], [b"EXEC"])
    assert [[part.decode() for part in command] for command in adds] == [
        [
            *("XADD", "ključ", f"{row['commit_lsn']}-{row['commit_idx']}"),
            *("record", row["record"], "changes", row["changes"] or "null"),
            *("action", row["action"], "metadata", row["metadata"]),
        ]
        for row in some.rows.to_pylist()
    ]


def test_each_message_is_added_to_the_stream_of_its_key() -> None:
    some = batch(0, 3)
    keys = pa.array(["a", "ključ", "a\r\nb"], pa.string())
    sent = b"".join(bytes(memoryview(part)) for part in encode(keys, some))
    _, *adds, _ = _parsed(sent)
    assert [command[1].decode() for command in adds] == keys.to_pylist()


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=9),
    st.booleans(),
    st.sampled_from([(), ("MAXLEN", "~", "1000")]),
)
def test_a_few_messages_are_the_same_bytes_as_by_whole_columns(
    keys: list[str], one: bool, trim: tuple[str, ...]
) -> None:
    some = batch(0, len(keys))
    to = "ključ" if one else pa.array(keys, pa.string())
    few = encode(to, some, trim)
    with patch.object(redis_wire, "FEW", 0):
        columns = encode(to, some, trim)
    assert b"".join(few) == b"".join(bytes(memoryview(part)) for part in columns)


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([ADDED] * 3, TransactionReply(3, 0)),
        ([THERE, THERE, ADDED], TransactionReply(3, 2)),
        ([THERE] * 3, TransactionReply(3, 3)),
        ([WRONGTYPE] * 3, TransactionReply(0, 0, WRONGTYPE[1:-2].decode())),
        ([THERE, ADDED, OOM], TransactionReply(2, 1, OOM[1:-2].decode())),
        ([ADDED, OOM, ADDED], TransactionReply(1, 0, OOM[1:-2].decode(), torn=True)),
        ([ADDED, OOM, THERE], TransactionReply(1, 0, OOM[1:-2].decode(), torn=True)),
    ],
)
def test_an_executed_transaction_settles_up_to_the_first_refusal(
    answers: list[bytes], outcome: TransactionReply
) -> None:
    assert read_outcome(_receive(_executed(*answers)), len(answers)) == outcome


def test_a_dropped_transaction_settles_nothing_and_names_the_first_cause() -> None:
    dropped = b"-EXECABORT Transaction discarded because of previous errors.\r\n"
    answer = b"+OK\r\n+QUEUED\r\n" + OOM + OOM + dropped
    assert read_outcome(_receive(answer), 3) == TransactionReply(0, 0, OOM[1:-2].decode())


def test_a_server_that_refuses_to_begin_settles_nothing() -> None:
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    assert read_outcome(_receive(loading * 4), 2).refusal.startswith("LOADING")
    assert read_outcome(_receive(loading * 4), 2).settled == 0


@given(
    answers=st.lists(st.sampled_from([ADDED, THERE, OOM, WRONGTYPE]), min_size=1, max_size=12),
    cuts=st.lists(st.integers(min_value=1), max_size=30),
)
def test_an_answer_means_the_same_however_it_is_cut(answers: list[bytes], cuts: list[int]) -> None:
    data = _executed(*answers)
    assert read_outcome(_receive(data, cuts), len(answers)) == read_outcome(
        _receive(data), len(answers)
    )


@given(
    answers=st.lists(st.sampled_from([ADDED, THERE, OOM]), min_size=1, max_size=8), data=st.data()
)
def test_an_answer_that_breaks_off_is_never_taken_for_whole(
    answers: list[bytes], data: st.DataObject
) -> None:
    whole = _executed(*answers)
    part = whole[: data.draw(st.integers(min_value=1, max_value=len(whole) - 1))]
    with pytest.raises(StopIteration):
        read_outcome(_receive(part), len(answers))


def test_a_transaction_that_a_watch_ended_did_nothing() -> None:
    answer = b"+OK\r\n" + b"+QUEUED\r\n" * 3 + b"*-1\r\n"
    for cut in range(1, len(answer)):
        parts = iter([answer[:cut], answer[cut:]])
        assert read_outcome(lambda: next(parts), 3) == TransactionReply(0, 0, touched=True)  # noqa: B023


USUAL = usual_answer(0, "7-1")


@given(st.lists(st.integers(0, 60), max_size=4))
def test_the_usual_answer_to_a_question_is_known_however_it_comes(cuts: list[int]) -> None:
    assert is_answer(_receive(USUAL, cuts), USUAL)


@pytest.mark.parametrize(
    "answer",
    [
        usual_answer(1, "7-1"),
        usual_answer(0, "7-2"),
        USUAL.replace(b":1", b":0"),
        USUAL[:-4] + b"*1\r\n*2\r\n$3\r\n7-2\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n",
        USUAL.replace(b"$-1\r\n:1", b"$3\r\n7-1\r\n:1"),
        b"-NOPERM no WATCH\r\n" * 8,
    ],
)
def test_any_other_answer_to_a_question_is_not_taken_for_it(answer: bytes) -> None:
    assert not is_answer(_receive(answer), USUAL)
