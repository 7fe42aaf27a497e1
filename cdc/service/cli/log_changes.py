"""The changes of a log as lines of JSON, for a person to read.

Rows are chosen by column before anything is decoded. A frame that is damaged or cannot be decoded
is reported and passed over: what stands behind it is still printed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.cursor import Cursor
from cdc.cursor_columns import at_or_above, cursor_columns
from cdc.decoding import decode_changes
from cdc.decoding.annotations import annotations_of
from cdc.decoding.groups import ACTIONS
from cdc.decoding.relation import parse_relation
from cdc.errors import CorruptionError, PoisonError, ProtocolError
from cdc.log.frame import Frame
from cdc.log.view import LogReader

KINDS = {action: kind for kind, action in ACTIONS.items()}
"""Actions, and the kinds of message they come from."""

_WAIT_S = 1.0


@dataclass(frozen=True)
class Choice:
    """Which changes to print; ``start`` inclusive, ``end`` exclusive, empty means all."""

    start: Cursor
    end: Cursor | None = None
    tables: Collection[str] = ()
    actions: Collection[str] = ()


@dataclass
class ChangePrinter:
    """Goes through a log once, or for as long as it grows."""

    log: LogReader
    choice: Choice
    complain: Callable[[str], None]
    raw: bool = False
    damaged: int = 0

    def lines(self, *, follow: bool = False) -> Iterator[bytes]:
        """One JSON object a change, in cursor order."""
        batch = max(self.log.seek(self.choice.start), self.log.first_batch())
        end = self.log.next_batch()
        while True:
            while batch < end:
                lines = self._batch(batch)
                if lines is None:
                    return
                yield from lines
                batch += 1
            if not follow:
                return
            end = self.log.wait(end, _WAIT_S)

    def _batch(self, batch: int) -> list[bytes] | None:
        """What is to be printed of a batch; None once the end of the choice is reached."""
        try:
            (frame,) = self.log.frames(batch, batch + 1)
            if self.choice.end is not None and frame.marker.first >= self.choice.end:
                return None
            chosen = choose(frame, self.choice)
            return raw_lines(frame, chosen) if self.raw else change_lines(frame, chosen)
        except (CorruptionError, PoisonError, ProtocolError) as error:
            self.damaged += 1
            self.complain(f"batch {batch}: {error}")
            return []


def choose(frame: Frame, choice: Choice) -> pa.BooleanArray:
    """Which rows of ``frame`` were asked for."""
    raw = frame.raw
    lsn, idx = cursor_columns(raw)
    keep = at_or_above(lsn, idx, choice.start)
    if choice.end is not None:
        keep &= ~at_or_above(lsn, idx, choice.end)
    if choice.actions:
        kinds = [ord(KINDS[action]) for action in choice.actions]
        keep &= np.isin(raw.column("kind").to_numpy(), kinds)
    if choice.tables:
        wanted = [
            schema_id
            for schema_id, message in frame.schemas.items()
            if str(parse_relation(message)) in choice.tables
        ]
        keep &= np.isin(raw.column("schema_id").to_numpy(), np.array(wanted, dtype=np.uint64))
    return pa.array(keep)


def change_lines(frame: Frame, chosen: pa.BooleanArray) -> list[bytes]:
    """Decoded changes; values keep the text they were decoded to."""
    annotations = annotations_of(frame.annotations, frame.raw.num_rows)
    changes = decode_changes(
        frame.raw.filter(chosen),
        frame.schemas,
        annotations=None if annotations is None else annotations.filter(chosen),
    )
    columns = changes.to_pydict()
    stamps = pc.strftime(changes.column("commit_timestamp"), "%Y-%m-%dT%H:%M:%SZ").to_pylist()
    return [
        _line(
            {
                "cursor": str(Cursor(columns["commit_lsn"][row], columns["commit_idx"][row])),
                "commit_timestamp": stamps[row],
                "xid": columns["xid"][row],
                "table": _table(columns["table_schema"][row], columns["table_name"][row]),
                "action": columns["action"][row],
                "record": _json(columns["record"][row]),
                "changes": _json(columns["changes"][row]),
                "record_pks": _json(columns["record_pks"][row]),
                "unchanged": _json(columns["unchanged"][row]),
                **_annotations(columns["annotations"][row]),
                **({"error": columns["error"][row]} if columns["error"][row] else {}),
            }
        )
        for row in range(changes.num_rows)
    ]


def raw_lines(frame: Frame, chosen: pa.BooleanArray) -> list[bytes]:
    """Messages as the source sent them, payload in hexadecimal."""
    raw = frame.raw.filter(chosen)
    columns = raw.to_pydict()
    return [
        _line(
            {
                "cursor": str(Cursor(columns["commit_lsn"][row], columns["commit_idx"][row])),
                "xid": columns["xid"][row],
                "kind": chr(columns["kind"][row]),
                "relation": columns["relation"][row],
                "schema_id": f"{columns['schema_id'][row]:016x}",
                "payload": columns["payload"][row].hex(),
            }
        )
        for row in range(raw.num_rows)
    ]


def _table(schema: str, name: str) -> str | None:
    return f"{schema}.{name}" if name else None


def _json(text: str | None) -> orjson.Fragment | None:
    return None if text is None else orjson.Fragment(text)


def _annotations(text: str | None) -> dict[str, orjson.Fragment]:
    return {} if text is None else {"annotations": orjson.Fragment(text)}


def _line(fields: dict[str, object]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
