"""The tops of the streams that a sink adds to: which are known to be ours, and how far they reach.

Invariants: a stream counts as ours only if its last entry was seen or written by this
sink over the connection that is open; what is forgotten is looked at again, so the bound costs
time, never safety.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import ROUTE, MessageBatch
from cdc.cursor import ORIGIN, Cursor
from cdc.errors import OperatorError
from cdc.generation import Generation
from sinks.redis_record import Record, StreamState, entry_cursor, ids_moved

STREAMS_MAX: Final = 10_000
ASKED_AT_ONCE: Final = 256
"""How many streams are asked for before the answers are read: both fit into socket buffers."""

Entry = tuple[bytes, list[bytes]]
"""What Redis says of an entry: its id, and its fields and values in turn."""


class StreamTops:
    """The last entries of the streams that were used last."""

    def __init__(self, consumer: str) -> None:
        self._consumer = consumer
        self._ours: OrderedDict[str, Cursor] = OrderedDict()

    def forget(self) -> None:
        self._ours.clear()

    def top(self, key: str) -> Cursor:
        """The last entry of a stream as far as it is known; ORIGIN if it is not."""
        return self._ours.get(key, ORIGIN)

    def above(self, key: str) -> str:
        """From where on entries of a stream are not known yet; most often there are none."""
        known = self.top(key)
        return f"{known.lsn}-{known.idx + 1}" if known > ORIGIN else "-"

    def seen(self, key: str, top: list[Entry]) -> None:
        """Take note of what stands above; an entry of another writer is refused."""
        if not top:
            return
        entry_id, pairs = top[0]
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        if not _names_its_entry(fields.get(b"metadata", b""), entry_id, self._consumer):
            raise OperatorError(
                f"the stream {key} holds entries that are not of the consumer {self._consumer}; "
                f"the last one is {entry_id.decode()}",
                fix="give every consumer streams of its own, by stream_key and routing, that "
                "nothing else adds to; to delete the entry alone does not lower the ids that Redis "
                "takes",
            )
        self._note(key, entry_cursor(entry_id))

    def looked(self, key: str, state: StreamState | None, record: Record, first: Cursor) -> Cursor:
        """Take note of a stream as it is, before messages from ``first`` on are added to it.

        Returns the last id that it had, ORIGIN if it is not there. Refuses a stream whose last
        entry is not ours, and one that would refuse a message of ours as a repeat because another
        writer moved its ids.
        """
        if record.moved is not None:
            raise ids_moved(key, record.moved)
        if state is None or state.last_id < self.top(key):
            self.forget()  # it is not what we added to
        if state is None:
            return ORIGIN
        if state.last_entry is not None and entry_cursor(state.last_entry[0]) > self.top(key):
            self.seen(key, [state.last_entry])
        # What readers deleted is known by the record, or by what this connection has added.
        ours = max(self.top(key), record.top)
        if state.last_id > ours and state.last_id >= first:
            raise ids_moved(key, ours)
        self._note(key, state.last_id)
        return state.last_id

    def written(self, tops: Iterable[tuple[str, Cursor]]) -> None:
        """What we have added ourselves."""
        for key, cursor in tops:
            self._note(key, cursor)

    def _note(self, key: str, cursor: Cursor) -> None:
        self._ours[key] = max(cursor, self._ours.get(key, ORIGIN))
        self._ours.move_to_end(key)
        while len(self._ours) > STREAMS_MAX:
            self._ours.popitem(last=False)


def keys_of(batch: MessageBatch, own: str, generation: Generation) -> str | pa.StringArray:
    """The stream of each message; without routes, the only one."""
    if ROUTE not in batch.rows.schema.names:
        return generation.named(own)
    routes = batch.rows.column(ROUTE).fill_null(own)
    return pc.binary_join_element_wise(routes, generation.named(""), "")


def streams_of(keys: str | pa.StringArray) -> list[str]:
    """Each stream once."""
    return [keys] if isinstance(keys, str) else keys.unique().to_pylist()


def last_of_each(
    batch: MessageBatch, keys: str | pa.StringArray, count: int
) -> Iterator[tuple[str, Cursor]]:
    """The last of the first ``count`` messages in each stream."""
    if not count:
        return
    if isinstance(keys, str):
        yield keys, batch.cursor(count - 1)
        return
    encoded = keys.slice(0, count).dictionary_encode()
    last = np.zeros(len(encoded.dictionary), np.int64)
    np.maximum.at(last, encoded.indices.to_numpy(), np.arange(count))
    for key, at in zip(encoded.dictionary.to_pylist(), last.tolist(), strict=True):
        yield key, batch.cursor(at)


def _names_its_entry(metadata: bytes, entry_id: bytes, consumer: str) -> bool:
    try:
        content = orjson.loads(metadata)
        cursor = f"{content['commit_lsn']}-{content['commit_idx']}"
        own_id = str(content.get("sequence", cursor)).encode()
        named = content.get("consumer") or {}
        return own_id == entry_id and named.get("name", consumer) == consumer
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
