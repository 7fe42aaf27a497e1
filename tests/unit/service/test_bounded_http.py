"""Clients that open connections and ask for nothing cost the server a bounded time."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from cdc.config import Http
from cdc.service.http.bounded import HEADER_BYTES_MAX, BoundedProtocol
from cdc.service.http.server import HttpServer

_NOWHERE = "host=127.0.0.1 port=1 user=u password=p dbname=d"


class NoProcesses:
    def processes(self) -> dict[str, bool]:
        return {}

    def starting(self) -> list[str]:
        return []

    def silent_s(self) -> float:
        return 0.0


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(BoundedProtocol, "request_s", 0.3)
    monkeypatch.setattr(BoundedProtocol, "connections_max", 3)
    with HttpServer(Http(port=0), _NOWHERE, NoProcesses()) as server:
        yield server.port


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    client.settimeout(10)
    return client


def ended(client: socket.socket) -> bool:
    """Whether the server has ended the connection, which is waited for."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_request_that_does_not_arrive_ends_its_connection(port: int, begun: bytes) -> None:
    with connected(port) as client:
        client.sendall(begun)
        assert ended(client)
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503


def test_a_body_that_does_not_arrive_ends_its_connection(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"POST /api HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        while client.recv(4096):  # an answer may come first
            pass


@pytest.mark.parametrize(
    "begun", [b"GET /health HTTP/1.1\r\nX-A: ", b"POST /api HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"]
)
def test_a_request_that_begins_behind_another_one_is_waited_for_no_longer(
    port: int, begun: bytes
) -> None:
    with connected(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + begun)
        client.settimeout(3)  # the server keeps an idle connection for longer
        received = b""
        while more := client.recv(4096):
            received += more
        assert received.startswith(b"HTTP/1.1 503")


def test_a_connection_beyond_the_bound_is_refused_and_one_that_ends_makes_room(port: int) -> None:
    first = [connected(port) for _ in range(3)]
    with connected(port) as beyond:
        assert ended(beyond)
    for each in first:
        each.close()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(2):  # a connection that is kept serves more than one request
            assert client.get("/health").json()["status"] == "down"


def test_headers_beyond_their_bound_are_refused_before_they_end(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * HEADER_BYTES_MAX)
        assert client.recv(4096).startswith(b"HTTP/1.1 400")
