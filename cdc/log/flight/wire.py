"""What the log's server and its remote readers say to each other over Arrow Flight.

Requests are small JSON objects; index entries travel packed as they are stored; a frame is one row
of bytes, exactly as stored, so that its checksum is proven where it is used. An error of ours
crosses as JSON and is raised on the other side as what it was: nothing from the network is
unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
import pyarrow as pa

from cdc import errors
from cdc.cursor import Cursor
from cdc.errors import OperatorError, ProtocolError, WalbrookError

PROTOCOL = 1
"""Goes up when server and client of two versions would no longer understand each other."""

TOKEN_VARIABLE = "WALBROOK_LOG_TOKEN"
"""The environment variable with the token of a run; every call carries it."""

CA_VARIABLE = "WALBROOK_LOG_CA"
"""The environment variable with the file of certificates that a server's is checked against."""

FRAME_SCHEMA = pa.schema([pa.field("frame", pa.large_binary(), nullable=False)])
"""One row per frame, header and body."""

BUSY = "log_server_busy"
"""The kind of the error that says: ask again in a moment."""

WAIT_S_MAX = 5.0
"""The longest that one call may wait for a batch; the client asks again."""

# An error travels in headers of the response, of which gRPC takes about 8 KiB, twice and escaped.
_ERROR_BYTES_MAX = 700

Arguments = dict[str, int | float]


@dataclass(frozen=True)
class Request:
    """A call's body: of which source, in which history (0: any), with which numbers."""

    source: str
    history: int
    arguments: Arguments

    def integer(self, name: str) -> int:
        value = self.arguments.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise _malformed(f"{name} is missing or no whole number")
        return value

    def seconds(self, name: str) -> float:
        value = self.arguments.get(name)
        if not isinstance(value, int | float):
            raise _malformed(f"{name} is missing or no number")
        return float(value)

    def cursor(self) -> Cursor:
        return Cursor(self.integer("lsn"), self.integer("idx"))


def pack_request(request: Request) -> bytes:
    return orjson.dumps(
        {
            "protocol": PROTOCOL,
            "source": request.source,
            "history": request.history,
            "arguments": request.arguments,
        }
    )


def read_request(body: bytes) -> Request:
    """Read what ``pack_request`` wrote, of this version."""
    try:
        fields = orjson.loads(body)
        protocol, source = fields["protocol"], fields["source"]
        history, arguments = fields["history"], fields["arguments"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise _malformed("it is not a request of this protocol") from None
    if protocol != PROTOCOL:
        raise OperatorError(
            f"the log server speaks version {PROTOCOL} of its protocol, the caller {protocol}",
            fix="run the same version of Walbrook on both sides",
        )
    if not isinstance(source, str) or not isinstance(history, int):
        raise _malformed("source or history is of the wrong type")
    if not isinstance(arguments, dict):
        raise _malformed("its arguments are no object")
    return Request(source, history, arguments)


def pack_error(error: WalbrookError) -> bytes:
    """``error`` as JSON, short enough for a header."""
    return orjson.dumps(
        {
            "type": type(error).__name__,
            "what": shortened(error.what),
            "fix": shortened(error.fix),
            "kind": error.kind,
        }
    )


def shortened(text: str) -> str:
    """As much of ``text`` as a header may carry of it, in bytes."""
    return text.encode(errors="replace")[:_ERROR_BYTES_MAX].decode(errors="ignore")


def read_error(packed: bytes) -> WalbrookError | None:
    """The error that ``pack_error`` packed; None if these bytes are none of ours."""
    try:
        fields = orjson.loads(packed)
        name, what, fix, kind = (str(fields[key]) for key in ("type", "what", "fix", "kind"))
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    found = getattr(errors, name, None)
    if not (isinstance(found, type) and issubclass(found, WalbrookError)):
        found = WalbrookError
    return found(what, fix=fix, kind=kind)


def _malformed(why: str) -> ProtocolError:
    return ProtocolError(
        f"the log server cannot read a request: {why}",
        fix="run the same version of Walbrook on both sides; if it is, report this",
    )
