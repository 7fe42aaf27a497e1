"""Transaction annotations: which of a batch's rows carry what their transaction said before them.

A client writes a logical message whose prefix is one of ``_SET``; every later change of the
transaction carries its content, up to the next such message or one of ``_CLEAR``. The messages
themselves carry none. Invariants: a change carries the same text however the stream is
cut into batches and whether its transaction comes whole or in pieces; nothing passes from one
transaction to the next; a text is valid JSON on one line. What is not JSON is refused: from there
on there is no annotation, and the refusal is reported. Only logical messages are looked at. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.cursor import Cursor
from cdc.decoding.annotations import AnnotationRun
from cdc.decoding.logical import parse_message
from cdc.errors import ProtocolError
from cdc.replication.wire.wire import BEGIN, COMMIT, MESSAGE, MESSAGE_PREFIX_AT, Ints, Wire

TEXT_BYTES_MAX: Final = 8 << 10
"""The longest annotation; a longer one is refused."""

_VERBS: Final = [f"{product}:transaction_annotations" for product in ("walbrook", "sequin")]
_SET: Final = frozenset(f"{verb}.set".encode() for verb in _VERBS)
_CLEAR: Final = frozenset(f"{verb}.clear".encode() for verb in _VERBS)

# Eight bytes are one comparison, and tell these prefixes from nearly all others.
_HEADS: Final = sorted({prefix[:8] for prefix in _SET})
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")


class RefusedAnnotation(NamedTuple):
    """An annotation that was not taken: the cursor of its message, and why."""

    cursor: Cursor
    why: str


@dataclass(frozen=True)
class BatchAnnotations:
    """What the messages of a batch said, by their positions in it."""

    spans: Sequence[tuple[int, int, bytes]] = ()  # after which, before which, what is in force
    refused: Sequence[tuple[int, str]] = ()

    def runs(self, kept: Ints) -> tuple[AnnotationRun, ...]:
        """The same over the rows of a batch; ``kept`` has the positions of their messages."""
        if not self.spans:
            return ()
        after, before, texts = zip(*self.spans, strict=True)
        starts = np.searchsorted(kept, after, side="right").tolist()
        stops = np.searchsorted(kept, before, side="left").tolist()
        return tuple(
            AnnotationRun(start, stop, text)
            for start, stop, text in zip(starts, stops, texts, strict=True)
            if start < stop
        )

    def refusals(self, kept: Ints, lsn: Ints, idx: Ints) -> tuple[RefusedAnnotation, ...]:
        """Those of the rows ``kept`` that were refused, by their cursors."""
        rows = np.searchsorted(kept, [at for at, _ in self.refused]).tolist()
        return tuple(
            RefusedAnnotation(Cursor(int(lsn[row]), int(idx[row])), why)
            for row, (at, why) in zip(rows, self.refused, strict=True)
            if row < len(kept) and kept[row] == at
        )


_NOTHING: Final = BatchAnnotations()


@dataclass
class AnnotationTracker:
    """Follows what is in force from batch to batch: of a connection, or of one transaction."""

    in_force: bytes | None = None

    def hear_wire(self, wire: Wire) -> BatchAnnotations:
        """Messages of transactions that come whole."""
        said = wire.messages_with(_HEADS)
        if self.in_force is None and not len(said):
            return _NOTHING
        ends = np.flatnonzero((wire.kind == BEGIN) | (wire.kind == COMMIT))
        return self._hear(said, [wire.message(at) for at in said.tolist()], ends, len(wire))

    def hear_rows(self, kinds: pa.Array, payloads: pa.Array, counted: Ints) -> BatchAnnotations:
        """Rows of one transaction, of which those at ``counted`` are part of what it committed."""
        said = counted[kinds.to_numpy()[counted] == MESSAGE]
        if len(said):
            spoken = payloads.take(pa.array(said))
            heads = pc.binary_slice(spoken, MESSAGE_PREFIX_AT, MESSAGE_PREFIX_AT + 8)
            ours = pc.is_in(heads, pa.array(_HEADS, pa.binary()))
            said = said[ours.to_numpy(zero_copy_only=False)]
        if self.in_force is None and not len(said):
            return _NOTHING
        messages: list[bytes] = payloads.take(pa.array(said)).to_pylist()
        return self._hear(said, messages, np.array([], dtype=np.int64), len(kinds))

    def _hear(
        self, said: Ints, messages: Sequence[bytes], ends: Ints, size: int
    ) -> BatchAnnotations:
        """``ends`` has the positions where transactions begin and end."""
        marks: list[tuple[int, bytes | None]] = [(-1, self.in_force)]
        refused: list[tuple[int, str]] = []
        for at, message in zip(said.tolist(), messages, strict=True):
            annotation = _annotation_of(message)
            if annotation is not None:
                marks.append((at, annotation.text))
                if annotation.fault:
                    refused.append((at, annotation.fault))
        places = [at for at, _ in marks]
        over = [*ends.tolist(), size]
        nth_end = np.searchsorted(ends, places).tolist()
        spans = [
            (at, min(following, over[nth]), text)
            for (at, text), following, nth in zip(marks, [*places[1:], size], nth_end, strict=True)
            if text is not None
        ]
        self.in_force = marks[-1][1] if nth_end[-1] == len(ends) else None
        return BatchAnnotations(spans, refused)


class _Annotation(NamedTuple):
    """What is in force from a message on, and what was wrong with it if anything was."""

    text: bytes | None
    fault: str = ""


def _annotation_of(payload: bytes) -> _Annotation | None:
    """None for a message that is none, whatever its prefix begins with."""
    try:
        message = parse_message(payload)
    except ValueError as fault:
        raise ProtocolError(f"a logical message cannot be read: {fault}", fix="reconnect") from None
    if not message.flags:
        return None  # it stands outside of every transaction
    if message.prefix in _CLEAR:
        return _Annotation(None)
    return _checked(message.content) if message.prefix in _SET else None


def _checked(content: bytes) -> _Annotation:
    if len(content) > TEXT_BYTES_MAX:
        return _Annotation(None, f"it has more than {TEXT_BYTES_MAX} bytes")
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return _Annotation(None, "it is not JSON in UTF-8")
    # Kept as written, since parsing would round large numbers. Strings have no raw line breaks, so
    # those that there are stand between values, where a space means the same.
    return _Annotation(content.translate(_ONE_LINE))
