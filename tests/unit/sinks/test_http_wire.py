"""The bytes of an HTTP exchange: whatever way they are cut, they mean the same."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.http_answers import Answer
from sinks.http_wire import (
    EXCERPT_BYTES_MAX,
    HEAD_BYTES_MAX,
    BadAnswerError,
    Exchanged,
    read_answer,
    request,
    request_head,
)

ANSWERS = {
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n": (200, b"", True),
    b"HTTP/1.1 204 No Content\r\n\r\n": (204, b"", True),
    b"HTTP/1.1 200 OK\r\ncontent-length:2\r\n\r\n{}": (200, b"{}", True),
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}": (200, b"{}", False),
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}": (200, b"{}", False),
    b"HTTP/1.1 422 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nbad\r\n2;x=y\r\n!!\r\n0\r\n\r\n": (
        422,
        b"bad!!",
        True,
    ),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\nx": (
        201,
        b"x",
        True,
    ),
    b"HTTP/1.1 503 Busy\r\n\r\nuntil it is closed": (503, b"until it is closed", False),
}


def read(data: bytes, cuts: Iterable[int] = ()) -> Exchanged:
    """What a server says that sends these bytes in these pieces, and then hangs up."""
    bounds = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    parts = [data[start:end] for start, end in pairwise(bounds)]
    reading = read_answer()
    next(reading)
    while True:
        try:
            reading.send(parts.pop(0) if parts else b"")
        except StopIteration as end:
            exchanged: Exchanged = end.value
            return exchanged


@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(1, 120), max_size=8))
def test_an_answer_means_the_same_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    status, excerpt, reusable = ANSWERS[data]
    assert read(data, cuts) == Exchanged(Answer(status, "", excerpt), reusable)


@given(st.sampled_from(sorted(ANSWERS)), st.integers(0, 200))
def test_an_answer_whose_head_is_not_whole_is_none(data: bytes, kept: int) -> None:
    head = data.index(b"\r\n\r\n") + 4
    if b"100 Continue" in data:
        head = data.index(b"\r\n\r\n", head) + 4
    with pytest.raises(BadAnswerError):
        read(data[: min(kept, head - 1)])


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"x" * (2 * HEAD_BYTES_MAX),
    ],
    ids=["another protocol", "another version", "a switch", "no end"],
)
def test_bytes_that_are_no_answer_are_refused(data: bytes) -> None:
    with pytest.raises(BadAnswerError):
        read(data)


def test_of_a_long_body_the_beginning_is_read_and_the_connection_is_given_up() -> None:
    head = b"HTTP/1.1 400 Bad\r\nContent-Length: 1000000\r\nRetry-After: 7\r\n\r\n"
    exchanged = read(head + b"x" * 1_000_000, range(0, 1_000_000, 5_000))
    assert exchanged == Exchanged(Answer(400, "7", b"x" * EXCERPT_BYTES_MAX), False)


def test_bytes_behind_an_answer_end_the_connection() -> None:
    exchanged = read(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 500")
    assert exchanged == Exchanged(Answer(200, "", b""), False)


def test_a_request_says_its_length_and_its_key() -> None:
    head = request_head("PUT", b"/a?b=c", "h:1", {"X": "y"})
    assert request(head, "k", (b"[", memoryview(b"12"), b"]")) == (
        b"PUT /a?b=c HTTP/1.1\r\nHost: h:1\r\nX: y\r\n"
        b"Idempotency-Key: k\r\nContent-Length: 4\r\n\r\n[12]"
    )
