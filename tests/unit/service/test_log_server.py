"""The log's server as a process: it serves what is written, and ends when told or left alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml

from cdc.errors import NEEDS_OPERATOR, TransientError
from cdc.log.flight.wire import TOKEN_VARIABLE
from cdc.log.open import open_log
from cdc.log.writer import LogWriter
from tests.unit.log_flight.batches import append, rows
from tests.waiting import until

ROOT = Path(__file__).parents[3]
TOKEN = "the-token-of-this-very-run"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def served(folder: Path, flight: dict[str, object], token: str) -> Iterator[subprocess.Popen[str]]:
    database = {
        "name": "shop",
        "url": "postgres://nobody@127.0.0.1:1/none",
        "slot": {"name": "s"},
        "publication": {"name": "p"},
    }
    config = folder / "walbrook.yaml"
    log = {"directory": "log", "flight": {"enabled": True, **flight}}
    config.write_text(yaml.safe_dump({"databases": [database], "log": log}))
    process = subprocess.Popen(
        [sys.executable, "-m", "cdc.service.process.log_server", str(config)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), TOKEN_VARIABLE: token},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def answers(where: str) -> int | None:
    try:
        with closing(open_log(where, token=TOKEN)) as log:
            return log.next_batch()
    except TransientError:
        return None


@pytest.mark.parametrize("ended_by", ["signal", "parent"])
def test_the_log_server_serves_until_a_stop(tmp_path: Path, ended_by: str) -> None:
    with closing(LogWriter(tmp_path / "log" / "shop")) as writer:
        append(writer, 10, 20)
        port = free_port()
        where = f"grpc://127.0.0.1:{port}/shop"
        with served(tmp_path, {"port": port}, TOKEN) as process:
            until("an answer", lambda: answers(where) == 2)
            with closing(open_log(where, token=TOKEN)) as log:
                assert [frame.raw for frame in log.frames(0, 2)] == [rows(10), rows(20)]
            if ended_by == "signal":
                process.terminate()
            else:
                assert process.stdin is not None
                process.stdin.close()
            assert process.wait(30) == 0
            assert process.stderr is not None
            said = process.stderr.read()
    assert "log_server.listening" in said
    assert TOKEN not in said


def test_without_a_token_it_asks_for_an_operator(tmp_path: Path) -> None:
    with served(tmp_path, {"port": free_port()}, "") as process:
        assert process.wait(30) == NEEDS_OPERATOR
        assert process.stderr is not None
        assert TOKEN_VARIABLE in process.stderr.read()


def test_a_certificate_that_is_none_asks_for_an_operator(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("not a certificate")
    flight = {"port": free_port(), "certificate": "cert.pem", "private_key": "key.pem"}
    with served(tmp_path, flight, TOKEN) as process:
        assert process.wait(30) == NEEDS_OPERATOR
        assert process.stderr is not None
        assert "certificate" in process.stderr.read()


def test_an_open_address_without_tls_is_warned_of(tmp_path: Path) -> None:
    with served(tmp_path, {"host": "0.0.0.0", "port": free_port()}, TOKEN) as process:
        assert process.stderr is not None
        assert "log_server.not_encrypted" in process.stderr.readline()
        assert "log_server.listening" in process.stderr.readline()
        process.terminate()
        assert process.wait(30) == 0
