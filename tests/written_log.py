"""A log written from pgoutput messages, a batch of the log for each list of them."""

from __future__ import annotations

from pathlib import Path

from cdc.log.writer import LogWriter, SegmentLimits
from cdc.replication.spill.spill import Spill
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.seal import Sealer
from tests.wire_messages import wire

SMALL = SegmentLimits(bytes=100_000)


class WrittenLog:
    """Appends batches until it is closed."""

    def __init__(self, directory: Path, limits: SegmentLimits = SMALL) -> None:
        self.directory = directory
        self.writer = LogWriter(directory, limits=limits)
        self._intake = TransactionAssembler(Sealer(), Spill(directory / "spill"))

    def append(self, *messages: bytes) -> None:
        for sealed in self._intake.take(wire(*messages)):
            self.writer.append(
                sealed.raw,
                sealed.schemas,
                first=sealed.first,
                high=sealed.high,
                annotations=sealed.annotations,
            )

    def close(self) -> None:
        self.writer.close()


def write(directory: Path, *batches: list[bytes]) -> None:
    """A whole log."""
    log = WrittenLog(directory)
    for messages in batches:
        log.append(*messages)
    log.close()
