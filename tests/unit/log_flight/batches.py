"""Batches for tests of reading: three rows each, one transaction a batch."""

from __future__ import annotations

import pyarrow as pa

from cdc.cursor import Cursor
from cdc.decoding.annotations import AnnotationRun
from cdc.decoding.raw import RAW_SCHEMA
from cdc.log.writer import LogWriter

SCHEMAS = {7: b"R-seven"}


def rows(lsn: int, size: int = 10, count: int = 3) -> pa.RecordBatch:
    """Raw rows of the transaction at ``lsn``, each with ``size`` bytes of payload."""
    return pa.RecordBatch.from_pydict(
        {
            "commit_lsn": [lsn] * count,
            "commit_idx": list(range(count)),
            "commit_ts": [1_767_225_600_000_000] * count,
            "xid": [1] * count,
            "kind": [ord("I")] * count,
            "relation": [1] * count,
            "schema_id": [7] * count,
            "payload": [bytes([65 + i % 26]) * size for i in range(count)],
        },
        schema=RAW_SCHEMA,
    )


def append(log: LogWriter, *lsns: int, size: int = 10) -> None:
    """One batch an LSN."""
    for lsn in lsns:
        log.append(
            rows(lsn, size),
            SCHEMAS,
            first=Cursor(lsn, 0),
            high=Cursor(lsn, 3),
            annotations=(AnnotationRun(1, 3, b"%d" % lsn),),
        )
