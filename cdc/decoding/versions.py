"""Where the rows of a slice pass from one table version to another. By column, pure.

What must always hold: put one after another, the transitions of the slices of a log say the same
however it was cut, except that a version in force is named again where a slice begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cdc.cursor import Cursor

_ENTRY = np.dtype([("relation", "<u4"), ("schema_id", "<u8"), ("lsn", "<i8"), ("idx", "<i8")])


@dataclass(frozen=True)
class Transition:
    """From the row at ``cursor`` on, rows of ``relation`` are of the version ``schema_id``."""

    relation: int
    schema_id: int
    cursor: Cursor


def encode_transitions(raw: pa.RecordBatch) -> bytes:
    """The transitions of RAW_SCHEMA rows: of each table its first row, and every change after."""
    if not raw.num_rows:
        return b""
    schema_id = raw.column("schema_id").to_numpy()
    relation = raw.column("relation").to_numpy()
    rows = np.zeros(1, dtype=np.int64)
    if (schema_id != schema_id[0]).any():
        # Neighbours of one version are one run; a run counts if its table's last one was another.
        runs = np.concatenate([rows, np.flatnonzero(schema_id[1:] != schema_id[:-1]) + 1])
        order = runs[np.argsort(relation[runs], kind="stable")]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (relation[order[1:]] != relation[order[:-1]]) | (
            schema_id[order[1:]] != schema_id[order[:-1]]
        )
        rows = np.sort(order[new])
    rows = rows[relation[rows] != 0]  # logical messages have no table
    entries = np.empty(len(rows), dtype=_ENTRY)
    entries["relation"], entries["schema_id"] = relation[rows], schema_id[rows]
    entries["lsn"] = raw.column("commit_lsn").to_numpy()[rows]
    entries["idx"] = raw.column("commit_idx").to_numpy()[rows]
    return entries.tobytes()


def decode_transitions(encoded: bytes) -> list[Transition]:
    """What ``encode_transitions`` wrote, in the order of the rows."""
    return [
        Transition(relation, schema_id, Cursor(lsn, idx))
        for relation, schema_id, lsn, idx in np.frombuffer(encoded, dtype=_ENTRY).tolist()
    ]
