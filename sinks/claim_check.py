"""Oversize messages as references: any sink, handed messages of a bounded size.

The content of a message above the bound is stored elsewhere (``claim_stores``), and the message
carries a reference in place of it: where it is, its size and digest, and the idempotency key.

Invariants: the content is stored before its message is sent. Its name is made of the consumer, the
idempotency key and a digest of the content, so that a message that is sent again refers to the same
content. The order and the number of messages stay as they are. A reference holds no secret.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import quote

import numpy as np
import orjson
import pyarrow as pa
import structlog

from cdc.change import MessageBatch
from cdc.errors import WalbrookError
from sinks.base import Delivery, Follower, RequestSink, Sink, probe
from sinks.claim_stores import ClaimPlace, ClaimStore, open_store
from sinks.columns import message_bytes

_logger = structlog.get_logger("walbrook.pull_claims")

_DIGEST_CHARS = 16  # of the name; the reference has the whole digest
_CLEAN_S = 600.0
_CLEAN_SHARE = 0.1  # of the time, while there is more to remove


class ClaimCheckedSink:
    """A sink and a store as one sink."""

    def __init__(self, sink: Sink, place: ClaimPlace, *, consumer: str) -> None:
        self._sink = sink
        self._place = place
        self._consumer = quote(consumer, safe="")
        self._store: ClaimStore | None = None
        self._clean_at = 0.0  # monotonic

    @property
    def messages_per_request(self) -> int:
        """Of a sink that sends requests."""
        return cast("RequestSink", self._sink).messages_per_request

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Store the content of what is too large, then deliver all of it in order."""
        try:
            bounded = self._bounded(batch)
        except WalbrookError as error:
            return Delivery(0, error=error)
        return self._sink.deliver(bounded)

    def deliver_parts(
        self, parts: Sequence[MessageBatch], follower: Follower | None = None
    ) -> list[Delivery]:
        """The same of several batches, if the sink can send them side by side."""
        try:
            bounded = [self._bounded(part) for part in parts]
        except WalbrookError as error:
            return [Delivery(0, error=error)] * len(parts)
        return cast("RequestSink", self._sink).deliver_parts(bounded, follower)

    def probe(self) -> str:
        """Look at the sink and at the store."""
        self._opened().probe()
        return f"{probe(self._sink)}; the store of oversize messages answers"

    def close(self) -> None:
        self._sink.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    def _bounded(self, batch: MessageBatch) -> MessageBatch:
        sizes = message_bytes(batch.rows, batch.shape.message_parts)
        large = np.flatnonzero(sizes > self._place.message_bytes_max)
        self._clean()
        if not len(large):
            return batch
        rows = batch.rows.take(pa.array(large))
        texts, keys = batch.shape.messages(rows), batch.shape.idempotency_keys(rows)
        references: list[str | None] = [None] * len(batch)
        for at, text, key in zip(large.tolist(), texts, keys.to_pylist(), strict=True):
            references[at] = self._stored(text.as_buffer().to_pybytes(), key)
        referring = batch.shape.refer(batch.rows, pa.array(references, pa.string()))
        return MessageBatch(referring, batch.shape)

    def _stored(self, payload: bytes, key: str) -> str:
        digest = hashlib.sha256(payload).hexdigest()
        name = f"{quote(key, safe='').replace('%3A', '-')}-{digest[:_DIGEST_CHARS]}"
        reference = {
            "location": self._opened().put(self._consumer, name, payload),
            "bytes": len(payload),
            "sha256": digest,
            "idempotency_key": key,
        }
        return orjson.dumps(reference).decode()

    def _opened(self) -> ClaimStore:
        if self._store is None:
            self._store = open_store(self._place)
        return self._store

    def _clean(self) -> None:
        """Remove what is older than it is kept; at a pace, and never in the way of a delivery."""
        now = time.monotonic()
        if now < self._clean_at:
            return
        self._clean_at = now + _CLEAN_S
        try:
            has_more = self._opened().clean(self._consumer, self._place.retain_days)
        except WalbrookError as error:
            _logger.warning("claims.not_cleaned", consumer=self._consumer, error=error.what)
            return
        if has_more:
            done = time.monotonic()
            self._clean_at = done + (done - now) / _CLEAN_SHARE
