"""A process that delivers recorded changes to Iceberg tables from the first on.

``python -m tests.iceberg_deliverer ROOT WAY FILE SEED``: cut at random, and tried again while
another writer is faster; it ends with 0 when all of it is settled.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.iceberg_lake import IcebergLake
from tests.lake_deliverer import deliver_all


def main(root: str, way: str, file: str, seed: str) -> None:
    sink = IcebergLake(Path(root)).sink(way)  # type: ignore[arg-type]
    deliver_all(sink, Path(file), int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
