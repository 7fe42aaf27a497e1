"""The bytes of one HTTP/1.1 exchange: the head of a request, and the parts of an answer that count.

Pure: bytes in, values out. Invariants: an answer counts only when its whole head is there; the body
only explains it, so whatever is wrong with the body takes nothing from the status; a connection is
kept only if the answer was read to its very end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sinks.http_answers import Answer

EXCERPT_BYTES_MAX = 4096
HEAD_BYTES_MAX = 64 << 10

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: |\r\n)")
_HEADER = re.compile(rb"\r\n([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*)")
_HEAD_END = b"\r\n\r\n"
_SWITCHING = 101

Receive = Callable[[], bytes]
"""The next bytes of the answer; empty when the server has hung up."""


class BadAnswerError(Exception):
    """What came is no answer in HTTP/1.1, or the server hung up before there was one."""


@dataclass(frozen=True)
class Exchanged:
    """An answer, and whether the connection can be used for another request."""

    answer: Answer
    reusable: bool


def request_head(method: str, target: bytes, host: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request up to the headers that change from one to the next."""
    lines = [f"{method} ".encode() + target + b" HTTP/1.1"]
    given = {"Host": host, **headers}
    lines += [f"{name}: {value}".encode() for name, value in given.items()]
    return b"\r\n".join([*lines, b""])


def request(head: bytes, key: str, parts: tuple[bytes | memoryview, ...]) -> bytes:
    """A whole request; ``parts`` are its body."""
    length = sum(map(len, parts))
    last = b"Idempotency-Key: %b\r\nContent-Length: %d\r\n\r\n" % (key.encode(), length)
    return b"".join((head, last, *parts))


def read_answer(receive: Receive) -> Exchanged:
    """Read one answer; what ``receive`` raises before the head is complete goes through."""
    data = b""
    while True:
        while (end := data.find(_HEAD_END)) < 0:
            part = receive()
            if not part:
                raise BadAnswerError("the server hung up without an answer")
            data += part
            if len(data) > HEAD_BYTES_MAX:
                raise BadAnswerError("the head of the answer does not end")
        found = _STATUS.match(data)
        if found is None:
            raise BadAnswerError("the server does not speak HTTP/1.1")
        status = int(found[2])
        if status >= 200:
            break
        if status == _SWITCHING:
            raise BadAnswerError("the server switched to another protocol")
        data = data[end + len(_HEAD_END) :]  # an interim answer: the real one follows
    headers = {name.lower(): value for name, value in _HEADER.findall(data[: end + 2])}
    excerpt, whole = _body(status, headers, data[end + len(_HEAD_END) :], receive)
    kept = found[1] == b"1" and b"close" not in headers.get(b"connection", b"").lower()
    retry_after = headers.get(b"retry-after", b"").decode("latin-1").strip()
    return Exchanged(Answer(status, retry_after, excerpt), whole and kept)


def _body(
    status: int, headers: Mapping[bytes, bytes], data: bytes, receive: Receive
) -> tuple[bytes, bool]:
    """The first bytes of the body, and whether it was read to its end and nothing follows it."""
    body = _Body(data, receive)
    try:
        if status in (204, 304):
            return b"", not data
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            return body.chunks()
        if b"content-length" in headers:
            return body.counted(int(headers[b"content-length"]))
        return body.until_closed()
    except (OSError, ValueError):
        return body.excerpt, False


class _Body:
    """A body as far as it is read: some more than the excerpt, never the whole of a long one."""

    def __init__(self, data: bytes, receive: Receive) -> None:
        self._data = data
        self._receive = receive
        self.excerpt = b""

    def counted(self, length: int) -> tuple[bytes, bool]:
        self._take(length)
        return self.excerpt, length <= EXCERPT_BYTES_MAX and not self._data

    def chunks(self) -> tuple[bytes, bool]:
        while len(self.excerpt) < EXCERPT_BYTES_MAX:
            size = int(self._line().partition(b";")[0], 16)
            if size == 0:
                while self._line():
                    continue  # what may follow the last chunk
                return self.excerpt, not self._data
            self._take(size)
            if self._line():
                raise ValueError("a chunk is longer than it says")
        return self.excerpt, False

    def until_closed(self) -> tuple[bytes, bool]:
        self._take(EXCERPT_BYTES_MAX)
        return self.excerpt, False

    def _take(self, count: int) -> None:
        """Move bytes into the excerpt, as many as there is room for."""
        wanted = min(count, EXCERPT_BYTES_MAX - len(self.excerpt))
        while wanted:
            if not self._data:
                self._more()
            self.excerpt += self._data[:wanted]
            taken = min(wanted, len(self._data))
            self._data = self._data[taken:]
            wanted -= taken

    def _line(self) -> bytes:
        while (end := self._data.find(b"\r\n")) < 0:
            if len(self._data) > EXCERPT_BYTES_MAX:
                raise ValueError("a line does not end")
            self._more()
        line, self._data = self._data[:end], self._data[end + 2 :]
        return line

    def _more(self) -> None:
        part = self._receive()
        if not part:
            raise ValueError("the body ends too early")
        self._data += part
