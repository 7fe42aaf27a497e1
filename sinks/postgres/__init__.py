"""Tables of a Postgres database: a mirror of the source, a history of its changes, or events.

A delivery is one transaction at the destination: tables are created and altered, rows are applied
and the position moves, or nothing of it happens. ``sink`` owns the transaction, ``position`` the
cursor in it, ``tables`` the target tables, ``sinks.tables`` cuts a batch into pieces in which
each table has one version. ``mirror`` (with ``fold``), ``history`` and ``events`` are the modes.
"""

from __future__ import annotations

from sinks.postgres.sink import PostgresSink
from sinks.postgres.target import TargetNames

__all__ = ["PostgresSink", "TargetNames"]
