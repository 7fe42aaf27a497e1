"""An HTTP endpoint that costs little: one process, one event loop, and no more HTTP than it needs.

It takes each request's JSON apart, as a receiver would, counts its messages by path, and answers
200, at once or after a pause. The first part of the path is the pause in milliseconds.
Invariant: what it has counted it has answered, or will once the pause is over.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import NamedTuple, Self

import orjson

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_HEAD_END, _LENGTH = b"\r\n\r\n", b"content-length:"
_ANSWER_TIMEOUT_S = 60.0


class EndpointCount(NamedTuple):
    """What came to one path: messages, requests, the most requests at once, and the last time."""

    messages: int = 0
    requests: int = 0
    at_once: int = 0
    last_s: float = 0.0  # by time.time


class FastEndpoint:
    """The process, from outside; a context manager that starts and ends it."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._ours, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs,), daemon=True)
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def url(self, name: str, pause_ms: int) -> str:
        return f"http://127.0.0.1:{self.port}{path(name, pause_ms)}"

    def count(self, name: str, pause_ms: int) -> EndpointCount:
        """What has come to a path so far."""
        self._ours.send(path(name, pause_ms))
        if not self._ours.poll(_ANSWER_TIMEOUT_S):
            raise TimeoutError("the endpoint did not say what has come")
        answer: EndpointCount = self._ours.recv()
        return answer

    def __enter__(self) -> Self:
        self._process.start()
        if not self._ours.poll(_ANSWER_TIMEOUT_S):
            raise TimeoutError("the endpoint did not start")
        self.port = self._ours.recv()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.join()


def path(name: str, pause_ms: int) -> str:
    return f"/{pause_ms}/{name}"


class _Counts:
    """All paths, from inside."""

    def __init__(self) -> None:
        self.by_path: dict[str, EndpointCount] = {}
        self._under_way: dict[str, int] = {}

    def come(self, path: str, body: bytes) -> None:
        content = orjson.loads(body)
        messages = len(content["data"]) if "data" in content else 1
        before = self.by_path.get(path, EndpointCount())
        under_way = self._under_way.get(path, 0) + 1
        self._under_way[path] = under_way
        self.by_path[path] = EndpointCount(
            before.messages + messages,
            before.requests + 1,
            max(before.at_once, under_way),
            time.time(),
        )

    def answered(self, path: str) -> None:
        self._under_way[path] -= 1


class _Exchange(asyncio.Protocol):
    """One connection; a client sends its next request when the last one was answered."""

    def __init__(self, counts: _Counts) -> None:
        self._counts = counts
        self._data = bytearray()
        self._needed = 0  # bytes of head and body, once the head is there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._needed:
            head_end = self._data.find(_HEAD_END)
            if head_end < 0:
                return
            head = bytes(self._data[:head_end])
            self._body_at = head_end + len(_HEAD_END)
            self._needed = self._body_at + _content_length(head)
            self._path = head.split(b" ", 2)[1].decode()
        if len(self._data) < self._needed:
            return
        self._counts.come(self._path, bytes(self._data[self._body_at : self._needed]))
        del self._data[: self._needed]
        self._needed = 0
        pause_s = int(self._path.split("/", 2)[1]) / 1000
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._answer, self._path)
        else:
            self._answer(self._path)

    def _answer(self, path: str) -> None:
        self._counts.answered(path)
        self._transport.write(_ANSWER)


def _content_length(head: bytes) -> int:
    at = head.lower().index(_LENGTH) + len(_LENGTH)
    end = head.find(b"\r\n", at)
    return int(head[at : end if end >= 0 else len(head)])


def _serve(asked: Connection) -> None:
    asyncio.run(_listen(asked))


async def _listen(asked: Connection) -> None:
    counts = _Counts()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Exchange(counts), "127.0.0.1", 0)

    def answer() -> None:
        asked.send(counts.by_path.get(asked.recv(), EndpointCount()))

    loop.add_reader(asked.fileno(), answer)
    asked.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()
