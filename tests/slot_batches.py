"""Batches as a sink with typed columns is handed them, decoded from a real slot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from cdc.change import MessageBatch
from cdc.decoding import decode_changes
from cdc.decoding.format import TEXTS, Wanted
from cdc.decoding.shapes import Context, shape_for
from tests.fix_postgres import Database
from tests.slot_decoder import SlotDecoder, slot_decoder

_WANTED = Wanted(texts=True)


@dataclass
class SlotBatches:
    """A source database whose changes are read from its slot."""

    slot: SlotDecoder

    def run(self, *statements: str) -> None:
        self.slot.run(*statements)

    def read(self) -> MessageBatch | None:
        """All that was committed since the last time; None if that is nothing."""
        sealed = self.slot.decoded().sealed
        if sealed is None or not sealed.raw.num_rows:
            return None
        return message_batch(decode_changes(sealed.raw, sealed.schemas, wanted=_WANTED))

    def taken(self) -> MessageBatch:
        batch = self.read()
        assert batch is not None
        return batch


def message_batch(changes: pa.RecordBatch) -> MessageBatch:
    shape = shape_for("sequin", Context("orders", "shop", "h", "app", now_ns=0))
    rows = shape.rows(changes)
    for name in TEXTS:
        rows = rows.append_column(name, changes.column(name))
    return MessageBatch(rows, shape)


def cut(batch: MessageBatch, rng: random.Random, pieces: int) -> Iterator[MessageBatch]:
    """The batch in up to so many pieces of any size."""
    ends = sorted({rng.randrange(1, len(batch) + 1) for _ in range(pieces - 1)} | {len(batch)})
    start = 0
    for end in ends:
        yield batch.slice(start, end - start)
        start = end


@contextmanager
def slot_batches(database: Database) -> Iterator[SlotBatches]:
    with slot_decoder(database) as slot:
        yield SlotBatches(slot)
