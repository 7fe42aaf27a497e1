"""Samples for a live trace: what a sink's expressions saw of a change, and what came of it.

Invariant: sampling changes nothing of the share, and looks at no more rows than it samples.
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson
import pyarrow as pa

from cdc.change import ROUTE
from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at
from spark_pipeline.delivery.deliver import Share, mine, shape_of, verdicts_of
from spark_pipeline.delivery.value_formats import view_of
from spark_pipeline.delivery.verdicts import judged

SAMPLE_BYTES_MAX = 256 << 10
"""Of a larger one only the size is shown."""

_INPUT = ("record", "changes", "record_pks", "unchanged", "annotations")


def samples_of(share: Share, decoded: Iterable[pa.RecordBatch], most: int) -> list[str]:
    """The first ``most`` changes that the consumer takes of a share, as JSON."""
    found: list[str] = []
    verdicts = verdicts_of(share)
    for changes in decoded:
        if len(found) >= most:
            break
        taken = mine(share, view_of(changes, share.wanted, share.consumer))
        rows = taken.slice(0, most - len(found))
        passed = rows.filter(rows.column("error").is_null())
        if verdicts is not None:
            passed = judged(passed, verdicts, share.consumer)
        said = {} if verdicts is None else _by_cursor(verdicts, rows)
        sent = _messages(share, passed)
        found += [_sample(rows, at, said, sent) for at in range(rows.num_rows)]
    return found


def _messages(share: Share, passed: pa.RecordBatch) -> dict[Cursor, str]:
    """What goes out, by cursor."""
    if not passed.num_rows:
        return {}
    shape = shape_of(share.consumer, share.origin)
    texts = shape.messages(shape.rows(passed), "").to_pylist()
    return {cursor_at(passed, at): text for at, text in enumerate(texts)}


def _by_cursor(verdicts: pa.RecordBatch, rows: pa.RecordBatch) -> dict[Cursor, dict[str, object]]:
    wanted = {cursor_at(rows, at) for at in range(rows.num_rows)}
    lsn, idx = (verdicts.column(name).to_pylist() for name in ("commit_lsn", "commit_idx"))
    return {
        cursor: verdicts.slice(at, 1).to_pylist()[0]
        for at, cursor in enumerate(map(Cursor, lsn, idx))
        if cursor in wanted
    }


def _sample(
    rows: pa.RecordBatch,
    at: int,
    said: dict[Cursor, dict[str, object]],
    sent: dict[Cursor, str],
) -> str:
    row = rows.slice(at, 1).to_pylist()[0]
    cursor = cursor_at(rows, at)
    verdict = said.get(cursor, {})
    output = sent.get(cursor)
    shown = {
        "cursor": str(cursor),
        "table": f"{row['table_schema']}.{row['table_name']}" if row["table_name"] else None,
        "action": row["action"],
        "input": {name: _json(row[name]) for name in _INPUT},
        "passed": output is not None,
        "error": row["error"] or verdict.get("error"),
        "route": verdict.get(ROUTE),
        "output": _json(output),
    }
    text = orjson.dumps(shown)
    if len(text) > SAMPLE_BYTES_MAX:
        kept = {name: shown[name] for name in ("cursor", "table", "action", "passed")}
        text = orjson.dumps({**kept, "too_large": len(text)})
    return text.decode()


def _json(text: str | None) -> orjson.Fragment | None:
    return None if text is None else orjson.Fragment(text)
