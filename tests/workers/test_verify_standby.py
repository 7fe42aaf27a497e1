"""A destination compared with a source that is a standby, while its primary writes."""

from __future__ import annotations

import threading
from pathlib import Path

from cdc.config import ParquetDestination
from tests.fix_postgres import Database
from tests.service.test_backfill_elsewhere import ROWS, StandbyRig, pair
from tests.standby import Pair, execute
from tests.workers.test_verify import _keys

__all__ = ["pair"]


def test_a_standby_is_compared_while_its_primary_writes(
    pair: Pair, database: Database, tmp_path: Path
) -> None:
    execute(pair.primary.dsn, f"INSERT INTO item SELECT generate_series(1, {ROWS})")
    destination = ParquetDestination(columns="json", max_delay_ms=0, path=tmp_path / "parquet")
    rig = StandbyRig(database, tmp_path, pair=pair, sink={"destination": destination})
    over = threading.Event()

    def write() -> None:
        at = 0
        while not over.wait(0.02):
            at += 1
            execute(
                pair.primary.dsn,
                f"DELETE FROM item WHERE id = {at}; INSERT INTO item VALUES ({ROWS + at});"
                f"UPDATE item SET id = {10 * ROWS + at} WHERE id = {1000 + at}",
            )

    writer = threading.Thread(target=write)
    with rig.running():
        rig.backfilled("item")
        writer.start()
        try:
            during = rig.verified()
        finally:
            over.set()
            writer.join()
        after = rig.verified()
    for row in (during, after):
        assert (row.missing, row.extra, row.different) == (0, 0, 0), _keys(rig, row.id)
    assert after.source_rows == after.destination_rows > ROWS // 2
