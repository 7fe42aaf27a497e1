"""When the tables of a lake are looked after, by tables that only count what is done."""

from __future__ import annotations

from typing import cast

from sinks.lakehouse.maintenance import Maintainer, MaintenancePlan
from sinks.lakehouse.names import LakeTarget
from sinks.lakehouse.table import LakeTable, TableState


class QuietTable:
    """A table without files, whose first vacuum fails."""

    vacuums = 0

    def load(self) -> TableState:
        return TableState()

    def files(self) -> list[object]:
        return []

    def vacuum(self, _retain_hours: int) -> int:
        self.vacuums += 1
        if self.vacuums == 1:
            raise OSError("the store is away")
        return 0


def test_a_vacuum_that_failed_is_tried_again_though_nothing_more_is_written() -> None:
    table = QuietTable()
    plan = MaintenancePlan(interval_s=3600, target_file_bytes=1, retain_hours=1)
    maintainer = Maintainer(lambda _target: cast("LakeTable", table), plan)
    maintainer.wrote(LakeTarget("public", "item"))
    maintainer.run_once()
    maintainer.run_once()
    assert table.vacuums == 2
    maintainer.run_once()
    assert table.vacuums == 2, "files of old versions go once a day"
    maintainer.close()
