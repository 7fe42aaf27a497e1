"""A reader of a slot and nothing else: no log, no state; for what concerns the connection alone."""

from __future__ import annotations

from collections.abc import Callable

from cdc.cursor import Cursor
from cdc.replication.source.identity import Identity, Recorded
from cdc.replication.source.slot_control import SlotControl
from cdc.replication.source.source_watch import SourceWatch
from cdc.replication.stream import ReplicationStream
from cdc.replication.wire.wire import HEARTBEAT_PREFIX
from cdc.stop import StopSignal
from tests.waiting import until

_HEADER = 25  # of a message of WAL data


class PlainReader:
    """Keeps what it read and where it is, over any number of connections."""

    def __init__(self, dsn: str, slot: str, recorded: Recorded, *, at: int) -> None:
        self.dsn = dsn
        self.slot = slot
        self.recorded = recorded
        self.resume = Cursor(at, 0)
        self.inserts: list[bytes] = []
        self.heartbeats: list[bytes] = []
        self.server_lsn = at
        self._stop = StopSignal()

    def look(self) -> Identity:
        control = SlotControl(self.dsn, self.slot, "pub")
        try:
            identity = control.look(self.recorded)
            control.check(identity, self.resume)
            return identity
        finally:
            control.close()

    def read(
        self, what: str, done: Callable[[], object], *, watch: SourceWatch | None = None
    ) -> Identity:
        """Check and stream until ``done``; whole transactions are confirmed at the end."""
        control = SlotControl(self.dsn, self.slot, "pub")
        try:
            identity = control.look(self.recorded)
            control.check(identity, self.resume)
            stream = ReplicationStream(
                self.dsn, slot=self.slot, publication="pub", start_lsn=self.resume.lsn
            )
            try:
                if watch is not None:
                    watch.attached(self.resume.lsn)

                def advance() -> object:
                    self._take(stream, watch)
                    return done()

                until(what, advance)
                stream.confirm(
                    received_lsn=self.resume.lsn,
                    confirmed_lsn=self.resume.lsn,
                    reply_requested=False,
                )
            finally:
                stream.close()
            self.recorded = Recorded(identity.system_identifier, identity.timeline)
            return identity
        finally:
            control.close()

    def _take(self, stream: ReplicationStream, watch: SourceWatch | None) -> None:
        messages: list[bytes] = []
        taken, keepalive = stream.drain(messages, bytes_max=1 << 20, rows_max=10_000)
        for message in messages:
            payload = message[_HEADER:]
            content = _heartbeat(payload)
            if content is not None:
                self.heartbeats.append(content)
                if watch is not None:
                    watch.returned(content)
            elif payload[:1] == b"I":
                self.inserts.append(payload)
            elif payload[:1] == b"C":
                # Commit: flags, the commit's LSN, the LSN after it.
                self.resume = Cursor(int.from_bytes(payload[10:18], "big"), 0)
        self.server_lsn = max(self.server_lsn, stream.server_lsn)
        if watch is not None:
            watch.check(stream.server_lsn)
        if not taken and keepalive is None:
            stream.wait(0.05, self._stop.descriptor)


def _heartbeat(payload: bytes) -> bytes | None:
    """The content of a logical message outside a transaction, if it is a heartbeat."""
    head, prefix = payload[:2], HEARTBEAT_PREFIX.encode() + b"\0"
    if head != b"M\0" or not payload.startswith(prefix, 10):
        return None
    return payload[10 + len(prefix) + 4 :]
