"""The bytes of one HTTP/1.1 exchange: the head of a request, and the parts of an answer that count.

Pure: bytes in, values out. Invariants: an answer counts only when its whole head is there; the body
only explains it, so whatever is wrong with the body takes nothing from the status; a connection is
kept only if the answer was read to its very end.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from sinks.http_answers import Answer

EXCERPT_BYTES_MAX = 4096
HEAD_BYTES_MAX = 64 << 10

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: |\r\n)")
_HEADER = re.compile(rb"\r\n([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n]*)")
_HEAD_END = b"\r\n\r\n"
_SWITCHING = 101


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


Reading = Generator[None, bytes, Exchanged]
"""Is sent what comes, piece by piece, and nothing once the server has hung up.

It returns when the response is there. An error that is thrown in goes through before the head is
complete, and ends the body behind it.
"""

_Body = Generator[None, bytes, bool]


def read_answer() -> Reading:
    """Read one answer."""
    data = b""
    while True:
        while (end := data.find(_HEAD_END)) < 0:
            part = yield
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
    body = _BodyReader(data[end + len(_HEAD_END) :])
    try:
        whole = yield from body.read(status, headers)
    except (OSError, ValueError):
        whole = False
    kept = found[1] == b"1" and b"close" not in headers.get(b"connection", b"").lower()
    retry_after = headers.get(b"retry-after", b"").decode("latin-1").strip()
    return Exchanged(Answer(status, retry_after, body.excerpt), whole and kept)


class _BodyReader:
    """A body as far as it is read: some more than the excerpt, never the whole of a long one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.excerpt = b""

    def read(self, status: int, headers: Mapping[bytes, bytes]) -> _Body:
        """Read it; returns whether it was read to its end and nothing follows it."""
        if status in (204, 304):
            return not self._data
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            return (yield from self._chunks())
        if b"content-length" in headers:
            length = int(headers[b"content-length"])
            yield from self._take(length)
            return length <= EXCERPT_BYTES_MAX and not self._data
        yield from self._take(EXCERPT_BYTES_MAX)
        return False

    def _chunks(self) -> _Body:
        while len(self.excerpt) < EXCERPT_BYTES_MAX:
            size = int((yield from self._line()).partition(b";")[0], 16)
            if size == 0:
                while (yield from self._line()):
                    continue  # what may follow the last chunk
                return not self._data
            yield from self._take(size)
            if (yield from self._line()):
                raise ValueError("a chunk is longer than it says")
        return False

    def _take(self, count: int) -> Generator[None, bytes, None]:
        """Move bytes into the excerpt, as many as there is room for."""
        wanted = min(count, EXCERPT_BYTES_MAX - len(self.excerpt))
        while wanted:
            if not self._data:
                yield from self._more()
            self.excerpt += self._data[:wanted]
            taken = min(wanted, len(self._data))
            self._data = self._data[taken:]
            wanted -= taken

    def _line(self) -> Generator[None, bytes, bytes]:
        while (end := self._data.find(b"\r\n")) < 0:
            if len(self._data) > EXCERPT_BYTES_MAX:
                raise ValueError("a line does not end")
            yield from self._more()
        line, self._data = self._data[:end], self._data[end + 2 :]
        return line

    def _more(self) -> Generator[None, bytes, None]:
        part = yield
        if not part:
            raise ValueError("the body ends too early")
        self._data += part
