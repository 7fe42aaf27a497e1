"""The sink of typed Parquet files: histories as every lakehouse sink writes them.

It can also empty its tables, for a rewind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cdc.change import MessageBatch
from cdc.errors import WalbrookError
from sinks.base import Delivery
from sinks.lakehouse.maintenance import MaintenancePlan
from sinks.lakehouse.names import GAPS, LakeNames, LakeTarget
from sinks.lakehouse.parquet.table import ParquetTable
from sinks.lakehouse.registry import REGISTRY, Registry
from sinks.lakehouse.sink import LakehouseSink


class TypedParquetSink(LakehouseSink):
    """Writes the tables of one consumer in one generation."""

    def __init__(
        self,
        open_table: Callable[[LakeTarget], ParquetTable],
        names: LakeNames,
        *,
        partition_by: Sequence[str],
        maintenance: MaintenancePlan | None = None,
    ) -> None:
        super().__init__(
            open_table,
            names,
            mode="append",
            partition_by=partition_by,
            maintenance=maintenance,
        )
        self._open = open_table
        self._known: ParquetTable | None = None  # the registry

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Commit the messages that their tables do not hold yet, in order."""
        try:
            self._empty_all()
        except WalbrookError as error:
            return Delivery(0, 0, error)
        return super().deliver(batch)

    def _empty_all(self) -> None:
        """Empty the tables that are not of the present truncation, each when it is loaded.

        The registry says so last, and by it a sink that is out of date is refused.
        """
        if self._known is None:
            self._known = self._open(REGISTRY)
        registry = self._known
        if registry.load() is not None and registry.must_empty():
            for target in (GAPS, *Registry(self._open).targets()):
                self._open(target).load()
            registry.truncated()
