"""Calls that the log's server does not answer with data: unknown ones, and senseless numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pyarrow.flight as flight
import pytest

from cdc.errors import GapError, OperatorError, ProtocolError
from cdc.log.flight.client import FlightLog
from cdc.log.flight.server import LogServer
from cdc.log.flight.wire import Request, pack_error, read_error
from cdc.log.writer import LogWriter
from tests.unit.log_flight.batches import append
from tests.unit.log_flight.conftest import TOKEN, address

OPTIONS = flight.FlightCallOptions(
    timeout=10, headers=[(b"authorization", f"Bearer {TOKEN}".encode())]
)
NOWHERE = flight.FlightDescriptor.for_path("x")


@pytest.mark.parametrize(
    "call",
    [
        lambda client: list(client.list_flights(options=OPTIONS)),
        lambda client: list(client.list_actions(OPTIONS)),
        lambda client: client.get_flight_info(NOWHERE, OPTIONS),
        lambda client: client.do_exchange(NOWHERE, OPTIONS)[1].read_chunk(),
    ],
)
def test_a_call_that_is_not_one_of_ours_is_refused_in_a_sentence(
    server: LogServer, call: Callable[[flight.FlightClient], object]
) -> None:
    with (
        closing(flight.FlightClient(f"grpc://127.0.0.1:{server.port}")) as client,
        pytest.raises(flight.FlightServerError, match="knows no call") as raised,
    ):
        call(client)
    assert "Traceback" not in str(raised.value)
    assert isinstance(read_error(raised.value.extra_info), ProtocolError)


def test_a_schema_is_not_to_be_had_either(server: LogServer) -> None:
    # Arrow's client turns what the server says into an error of its own.
    with (
        closing(flight.FlightClient(f"grpc://127.0.0.1:{server.port}")) as client,
        pytest.raises(OSError, match="knows no call 'get_schema'") as raised,
    ):
        client.get_schema(NOWHERE, OPTIONS)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize("source", ["x" * 20_000, "é" * 3_000, "\n" * 3_000, "\U0001f4a5" * 3_000])
def test_a_long_error_still_arrives_as_ours(server: LogServer, source: str) -> None:
    error = OperatorError(source, fix=source)
    found = read_error(pack_error(error))
    assert found is not None
    assert source.startswith(found.what)
    assert 0 < len(found.what.encode()) <= 700
    if "\n" not in source:
        with (
            closing(FlightLog(address(server, source), token=TOKEN)) as log,
            pytest.raises(OperatorError, match="the log server has no source"),
        ):
            log.next_batch()


@pytest.mark.parametrize("start", [2**40, 2**62, -(2**62)])
def test_batches_far_beyond_the_log_are_a_gap(
    server: LogServer, writer: LogWriter, start: int
) -> None:
    append(writer, 10)
    with closing(FlightLog(address(server), token=TOKEN)) as log:
        with pytest.raises(GapError, match="not all in the log"):
            log.entries(start, start + 2)
        with pytest.raises(GapError, match="not all in the log"):
            list(log.frames(start, start + 2))


def test_a_truth_value_is_no_number() -> None:
    with pytest.raises(ProtocolError, match="no whole number"):
        Request("shop", 0, {"start": True}).integer("start")
