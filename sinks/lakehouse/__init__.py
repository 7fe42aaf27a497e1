"""Tables of a lakehouse: a table per table of the source, with typed columns, exactly once.

``sink`` delivers: it cuts a batch into parts of one table and one version, brings the table to that
version (``evolving``), and commits the rows of each part with the table's own position (``table``).
``writing`` has the two modes: ``appending`` adds changes, ``merging`` keeps the current state.
``files`` writes and reads Parquet on a disk or an object store. ``maintenance`` merges small files
beside deliveries.

A table format is a room of its own (``delta``, ``iceberg``) that implements ``LakeTable``.
"""

from __future__ import annotations

from sinks.lakehouse.maintenance import MaintenancePlan
from sinks.lakehouse.names import LakeNames
from sinks.lakehouse.sink import LakehouseSink

__all__ = ["LakeNames", "LakehouseSink", "MaintenancePlan"]
