"""The network between: tokens, errors, lost and damaged connections, bounds, TLS."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow.flight as flight
import pytest
from structlog.testing import capture_logs

import cdc.log.flight.client
from cdc.cursor import Cursor
from cdc.errors import (
    CorruptionError,
    GapError,
    OperatorError,
    ProtocolError,
    TransientError,
    WalbrookError,
)
from cdc.log.damage_note import take_damage_report
from cdc.log.flight.client import FlightLog
from cdc.log.flight.server import CallLimits, LogServer, ServerTls
from cdc.log.flight.wire import CA_VARIABLE, TOKEN_VARIABLE, pack_error, read_error
from cdc.log.view import LogView
from cdc.log.writer import LogWriter
from tests.unit.log_flight.batches import append
from tests.unit.log_flight.conftest import SOURCE, TOKEN, address
from tests.unit.log_flight.lines import line_to
from tests.waiting import until


@pytest.fixture
def remote(server: LogServer) -> Iterator[FlightLog]:
    with closing(FlightLog(address(server), token=TOKEN)) as log:
        yield log


@pytest.mark.parametrize("headers", [[], [(b"authorization", b"Bearer wrong")]])
def test_every_method_without_the_token_is_refused(
    server: LogServer, headers: list[tuple[bytes, bytes]]
) -> None:
    options = flight.FlightCallOptions(timeout=10, headers=headers)
    ticket = flight.Ticket(b"{}")
    with closing(flight.FlightClient(f"grpc://127.0.0.1:{server.port}")) as client:
        for call in (
            lambda: list(client.do_action(flight.Action("look", b"{}"), options)),
            lambda: client.do_get(ticket, options).read_all(),
            lambda: list(client.list_flights(options=options)),
            lambda: list(client.list_actions(options)),
        ):
            with pytest.raises(flight.FlightUnauthenticatedError):
                call()


def test_a_wrong_token_is_the_operators_and_stands_in_no_error_or_log(server: LogServer) -> None:
    secret = "another-run-had-this-token"
    with capture_logs() as logged, closing(FlightLog(address(server), token=secret)) as log:
        with pytest.raises(OperatorError, match="does not accept the token") as caught:
            log.next_batch()
        with pytest.raises(OperatorError, match="does not accept the token"):
            list(log.frames(0, 1))
    said = f"{caught.value!s} {caught.value!r} {logged}"
    assert secret not in said
    assert TOKEN not in said
    assert caught.value.kind == "log_token"


def test_the_token_comes_from_the_environment(
    server: LogServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(OperatorError, match=TOKEN_VARIABLE):
        FlightLog(address(server))
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with closing(FlightLog(address(server))) as log:
        assert log.next_batch() == 0


@pytest.mark.parametrize(
    "token", ["", "too-brief", "ümlaut-ümlaut-ümlaut", "line\nbreak in a token"]
)
def test_a_server_wants_a_token_worth_the_name(directory: Path, token: str) -> None:
    with pytest.raises(OperatorError, match=TOKEN_VARIABLE) as caught:
        LogServer({SOURCE: directory}, token=token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize(
    "where",
    [
        "http://host:1/shop",
        "grpc://host/shop",
        "grpc://host:1/",
        "grpc://host:1/a/b",
        "grpc://token@host:1/shop",
        "grpc://host:x/shop",
        "grpc://host:1/shop?token=x",
    ],
)
def test_an_address_that_is_not_one_is_refused(where: str) -> None:
    with pytest.raises(OperatorError, match="grpc://host:port/source") as caught:
        FlightLog(where, token=TOKEN)
    assert "token@" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        GapError("a hole", fix="start again", kind="log_gap"),
        CorruptionError("bad bytes", fix="restore it"),
        TransientError("in a moment", kind="x"),
        WalbrookError("something"),
    ],
)
def test_an_error_crosses_as_what_it_was(error: WalbrookError) -> None:
    found = read_error(pack_error(error))
    assert found is not None
    assert type(found) is type(error)
    assert (found.what, found.fix, found.kind) == (error.what, error.fix, error.kind)


@pytest.mark.parametrize("packed", [b"", b"\x80\x04", b"[1]", b'{"type":"GapError"}', b"null"])
def test_bytes_that_are_no_error_of_ours_are_none(packed: bytes) -> None:
    assert read_error(packed) is None


def test_an_error_names_no_class_but_those_of_the_tree() -> None:
    packed = json.dumps({"type": "annotations", "what": "w", "fix": "f", "kind": ""}).encode()
    assert type(read_error(packed)) is WalbrookError


def test_a_source_the_server_does_not_have_is_named(server: LogServer) -> None:
    with (
        closing(FlightLog(address(server, "other"), token=TOKEN)) as log,
        pytest.raises(OperatorError, match=r"no source 'other'.*shop"),
    ):
        log.next_batch()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"not json", ProtocolError),
        (b'{"protocol":99,"source":"shop","history":0,"arguments":{}}', OperatorError),
        (b'{"protocol":1,"source":"shop","history":0,"arguments":{}}', ProtocolError),
        (b'{"protocol":1,"source":[],"history":0,"arguments":{}}', ProtocolError),
    ],
)
def test_a_request_that_cannot_be_read_is_answered_with_why(
    server: LogServer, body: bytes, expected: type[WalbrookError]
) -> None:
    header = (b"authorization", f"Bearer {TOKEN}".encode())
    options = flight.FlightCallOptions(timeout=10, headers=[header])
    with closing(flight.FlightClient(f"grpc://127.0.0.1:{server.port}")) as client:
        for call in (
            lambda: list(client.do_action(flight.Action("seek", body), options)),
            lambda: client.do_get(flight.Ticket(body), options).read_all(),
        ):
            with pytest.raises(flight.FlightError) as caught:
                call()
            assert type(read_error(caught.value.extra_info)) is expected


def test_a_bug_of_the_server_is_reported_without_its_details(
    server: LogServer, remote: FlightLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_view: LogView) -> int:
        raise ValueError("a detail for the server's log alone")

    monkeypatch.setattr(LogView, "next_batch", fail)
    with capture_logs() as logged, pytest.raises(ProtocolError, match="ValueError") as caught:
        remote.next_batch()
    assert "detail" not in str(caught.value)
    assert [line["event"] for line in logged] == ["log_server.failed"]


def test_a_server_that_went_away_is_transient(directory: Path, writer: LogWriter) -> None:
    append(writer, 10)
    server = LogServer({SOURCE: directory}, token=TOKEN)
    with closing(FlightLog(address(server), token=TOKEN)) as log:
        assert log.next_batch() == 1
        assert server.close()
        for call in (log.next_batch, lambda: list(log.frames(0, 1)), lambda: log.wait(1, 5.0)):
            with pytest.raises(TransientError, match="cannot be reached"):
                call()


def test_a_connection_cut_in_mid_stream_is_transient(server: LogServer, writer: LogWriter) -> None:
    append(writer, *range(10, 40), size=2 << 20)
    with line_to(server.port) as line:
        where = f"grpc://127.0.0.1:{line.port}/{SOURCE}"
        with closing(FlightLog(where, token=TOKEN)) as log:
            frames = log.frames(0, 30)
            assert next(frames).marker.batch_idx == 0
            line.cut()
            with pytest.raises(TransientError):
                list(frames)


def test_a_server_that_never_answers_is_transient_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"grpc://127.0.0.1:{silent.getsockname()[1]}/shop"
        with closing(FlightLog(where, token=TOKEN, call_timeout_s=0.5)) as log:
            started = time.monotonic()
            for call in (log.next_batch, lambda: list(log.frames(0, 1))):
                with pytest.raises(TransientError, match=r"within 0\.5 s"):
                    call()
            assert time.monotonic() - started < 10.0


def test_a_byte_flipped_on_the_way_is_noticed_and_may_pass(
    server: LogServer, writer: LogWriter
) -> None:
    append(writer, 10, 20, size=5000)

    def flip(data: bytes) -> bytes:
        return data.replace(b"B" * 100, b"B" * 50 + b"C" + b"B" * 49, 1)

    with line_to(server.port, flip) as line:
        where = f"grpc://127.0.0.1:{line.port}/{SOURCE}"
        with closing(FlightLog(where, token=TOKEN)) as log:
            assert log.next_batch() == 2, "the line carries what it does not damage"
            with pytest.raises(TransientError, match="damaged on the way"):
                list(log.frames(0, 2))


def test_damage_that_a_remote_reader_meets_is_reported_to_the_writer(
    writer: LogWriter, remote: FlightLog, directory: Path
) -> None:
    append(writer, 10, size=5000)
    path = next(directory.glob("*.seg"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"B" * 100, b"B" * 50 + b"C" + b"B" * 49, 1))
    with pytest.raises(CorruptionError) as caught:
        list(remote.frames(0, 1))
    assert path.name in caught.value.what, "the server names the file"
    assert take_damage_report(directory)


def test_a_caller_slower_than_a_call_may_last_gets_every_frame(
    server: LogServer, writer: LogWriter
) -> None:
    append(writer, *range(10, 40), size=1 << 20)
    with closing(FlightLog(address(server), token=TOKEN, call_timeout_s=0.5)) as log:
        found = []
        for frame in log.frames(0, 30):
            found.append(frame.marker.batch_idx)
            if len(found) in (1, 8):
                time.sleep(0.8)
    assert found == list(range(30))


def test_a_wait_longer_than_one_call_goes_on(
    writer: LogWriter, remote: FlightLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cdc.log.flight.client, "WAIT_S_MAX", 0.05)
    thread = threading.Timer(0.4, append, (writer, 10))
    thread.start()
    assert remote.wait(0, 30.0) == 1
    thread.join()


def test_waiting_readers_leave_room_for_reading_ones(directory: Path, writer: LogWriter) -> None:
    append(writer, 10)
    server = LogServer({SOURCE: directory}, token=TOKEN, limits=CallLimits(calls=4, waits=2))
    logs = [FlightLog(address(server), token=TOKEN) for _ in range(9)]
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(log.wait, 1, 60.0) for log in logs[:8]]
        until("both places taken", lambda: not server._waits._value)
        for _ in range(20):
            assert len(list(logs[8].frames(0, 1))) == 1
        append(writer, 20)
        assert [wait.result() for wait in waits] == [2] * 8, "those without a place are told too"
    for log in logs:
        log.close()
    assert server.close()


def test_more_calls_than_the_server_takes_are_made_again(
    directory: Path, writer: LogWriter
) -> None:
    append(writer, *range(10, 20), size=1 << 20)
    server = LogServer({SOURCE: directory}, token=TOKEN, limits=CallLimits(calls=1, waits=1))
    held = FlightLog(address(server), token=TOKEN)
    frames = held.frames(0, 10)
    next(frames)
    hasty = FlightLog(address(server), token=TOKEN, call_timeout_s=0.3)
    patient = FlightLog(address(server), token=TOKEN)
    with pytest.raises(TransientError, match="too many calls"):
        hasty.next_batch()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(patient.next_batch)
        assert len(list(frames)) == 9
        assert asked.result() == 10
    for log in (held, hasty, patient):
        log.close()
    assert server.close()


def test_closing_does_not_wait_for_those_who_wait(directory: Path, writer: LogWriter) -> None:
    append(writer, 10)
    server = LogServer({SOURCE: directory}, token=TOKEN)
    with closing(FlightLog(address(server), token=TOKEN)) as log, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(log.wait, 1, 60.0)
        until("a wait", lambda: server._waits._value < CallLimits().waits)
        started = time.monotonic()
        assert server.close()
        assert time.monotonic() - started < 3.0
        with pytest.raises(TransientError):
            waiting.result()


def test_a_stream_left_by_its_reader_gives_back_its_place(
    directory: Path, writer: LogWriter
) -> None:
    append(writer, *range(10, 30), size=1 << 20)
    server = LogServer({SOURCE: directory}, token=TOKEN, limits=CallLimits(calls=1, waits=1))
    with closing(FlightLog(address(server), token=TOKEN)) as log:
        for _ in range(3):
            for frame in log.frames(0, 20):
                assert frame.marker.batch_idx == 0
                break
        assert len(list(log.frames(0, 20))) == 20
    assert server.close()


def test_a_port_that_is_taken_is_not_shared_silently(directory: Path, server: LogServer) -> None:
    with pytest.raises(TransientError, match="cannot listen"):
        LogServer({SOURCE: directory}, token=TOKEN, port=server.port)


def test_many_entries_come_in_pieces(
    writer: LogWriter, remote: FlightLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.flight.server._ENTRIES_AT_ONCE", 7)
    monkeypatch.setattr("cdc.log.flight.server._BATCHES_AT_ONCE", 7)
    append(writer, *range(10, 60))
    assert remote.entries(0, 50)["batch_idx"].tolist() == list(range(50))
    assert [frame.marker.batch_idx for frame in remote.frames(3, 50)] == list(range(3, 50))


@pytest.fixture(scope="session")
def identity(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ServerTls]:
    """A certificate for localhost, signed by itself: its file, and what the server needs."""
    folder = tmp_path_factory.mktemp("identity")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, ServerTls(certificate.read_bytes(), key.read_bytes())


def test_tls_is_used_and_the_certificate_checked(
    directory: Path,
    writer: LogWriter,
    identity: tuple[Path, ServerTls],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append(writer, 10)
    certificate, tls = identity
    server = LogServer({SOURCE: directory}, token=TOKEN, tls=tls)
    where = f"grpc+tls://localhost:{server.port}/{SOURCE}"
    monkeypatch.setenv(CA_VARIABLE, str(certificate))
    with closing(FlightLog(where, token=TOKEN)) as log:
        assert [frame.marker.high for frame in log.frames(0, 1)] == [Cursor(10, 3)]
    monkeypatch.delenv(CA_VARIABLE)
    for stranger in (where, where.replace("grpc+tls", "grpc")):
        with (
            closing(FlightLog(stranger, token=TOKEN, call_timeout_s=5)) as log,
            pytest.raises(TransientError),
        ):
            log.next_batch()
    assert server.close()


def test_a_missing_file_of_certificates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA_VARIABLE, "/nowhere/ca.pem")
    with pytest.raises(OperatorError, match=r"/nowhere/ca\.pem"):
        FlightLog("grpc+tls://localhost:1/shop", token=TOKEN)
