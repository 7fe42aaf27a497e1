"""Repair of a source whose slot has lost changes: a new slot, and backfills over what was lost.

Steps: the lock of the slot is taken, so that no reader reads it; what is wrong is looked at; the
slot is recreated; then one transaction in the state database moves the consumers to where it
begins, records their gaps, and asks for backfills of the rows that changed meanwhile. The service
delivers these like any backfill.

Invariants: nothing is dropped unless changes are lost for certain, and unless the source's history
has all that was read. A repair that is killed between two steps is begun again with the same
command: it finds a slot that is missing, or one that stands beyond what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

import psycopg
import structlog

from cdc.backfill.table import describe_table, published_tables
from cdc.config import Config, Database, SinkConfig
from cdc.config.read_back import unreadable_reason
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.errors import GapError, OperatorError, SourceError
from cdc.failpoints import reached
from cdc.reach import reach
from cdc.replication.preflight.slot import create_slot
from cdc.replication.preflight.standby import StandbySnapshots
from cdc.replication.source.identity import Recorded
from cdc.replication.source.slot_control import SlotControl, publication_missing
from cdc.state.audit import note_act
from cdc.state.positions import source_position
from cdc.state.repairs import Deletes, TableRepair, begin_repair, lost_changes, read_up_to

_logger = structlog.get_logger("walbrook.repair")

_REPLACED: Final = "publication_replaced"
_LISTED_MAX: Final = 10
REPAIRABLE: Final = ("slot_missing", "slot_lost", "slot_ahead", _REPLACED)
"""What a look at the source can find that a repair bridges."""
_REPORTED: Final = (
    *REPAIRABLE, "prepared_missing", "untranslatable_text", "log_ends_early", "spill_damaged",
)  # fmt: skip

_PUBLICATION = "SELECT oid::int8 FROM pg_publication WHERE pubname = %s"
_NEXT_XID = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
_DROP = """
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s
"""


@dataclass(frozen=True)
class Repaired:
    """A repair that has begun."""

    id: int
    found: str  # the kind of what was wrong
    lsn: int  # where the new slot begins


def repair(config: Config, name: str, *, deletes: Deletes) -> Repaired:
    """Begin the repair of a source; the service does the rest once it runs.

    With ``deletes`` "find" a consumer whose destination cannot say which rows it holds refuses the
    repair; with "skip" it is repaired without the deletes, and its gap says so.
    """
    database = _database(config, name)
    sinks = [sink for sink in config.sinks_of(name) if sink.status == "active"]
    with ExitStack() as held:
        state = held.enter_context(reach(config.state_dsn(), config.state_called()))
        source = held.enter_context(reach(database.dsn(), f"database {name}"))
        position = source_position(state, name)
        control = SlotControl(database.dsn(), database.slot.name, database.publication.name)
        held.enter_context(closing(control))
        recorded = Recorded(
            position.system_identifier, position.timeline, position.publication_oid, name
        )
        read = read_up_to(state, name)
        server = control.check_server(recorded, read)
        found = _lost(control, recorded, state, name)
        published = _publication(source, database.publication.name)
        # With the slot missing as well, that is what was found.
        replaced = found == _REPLACED or position.publication_oid not in (None, published)
        tables = _tables(source, database, sinks, replaced=replaced)
        if deletes == "find":
            _refuse_unknown_deletes(tables)
        snapshots = StandbySnapshots(database.primary_dsn()) if server.in_recovery else None
        lsn = _new_slot(source, database, snapshots)
        reached("slot_made")
        row = source.execute(_NEXT_XID).fetchone()
        assert row is not None
        number = begin_repair(
            state, name, found=found, deletes=deletes, lsn=lsn, next_xid=int(str(row[0])),
            tables={sink: [each.repair for each in planned] for sink, planned in tables.items()},
        )  # fmt: skip
        note_act(state, "repair", {"source": name, "deletes": deletes, "id": number})
    _logger.info("repair.begun", source=name, repair=number, found=found)
    return Repaired(number, found, lsn)


@dataclass(frozen=True)
class _Planned:
    repair: TableRepair
    wants_deletes: bool  # whether the sink takes deletes at all


def _database(config: Config, name: str) -> Database:
    for database in config.databases:
        if database.name == name:
            return database
    known = ", ".join(each.name for each in config.databases)
    raise OperatorError(f"there is no source {name}", fix=f"name one of {known}", kind="unknown")


def _lost(control: SlotControl, recorded: Recorded, state: Connection, name: str) -> str:
    """The kind of what is wrong; raises if nothing is, or if a repair cannot help."""
    try:
        identity = control.look(recorded)
        control.check(identity, read_up_to(state, name))
    except (SourceError, GapError) as error:
        if error.kind not in REPAIRABLE:
            raise
        return error.kind
    found = lost_changes(state, name, _REPORTED)
    if found is None:
        raise OperatorError(
            f"source {name} has lost nothing: its slot has all that was not read",
            fix="start the service; walbrook.health says what is wrong, if anything is",
            kind="nothing_lost",
        )
    return found


def _publication(source: Connection, name: str) -> int:
    row = source.execute(_PUBLICATION, (name,)).fetchone()
    if row is None:
        raise publication_missing(name)
    return int(str(row[0]))


def _tables(
    source: Connection, database: Database, sinks: Sequence[SinkConfig], *, replaced: bool
) -> dict[str, list[_Planned]]:
    """What each consumer takes, and what is known of these tables beforehand."""
    publication = database.publication.name
    names = published_tables(source, publication)
    facts = {table: _facts(source, publication, table) for table in names}
    return {
        sink.name: [
            _planned(sink, table, names, *facts[table], replaced=replaced)
            for table in names
            if sink.source.takes(table.schema, table.table)
        ]
        for sink in sinks
    }


def _facts(source: Connection, publication: str, table: TableName) -> tuple[bool, bool]:
    """Whether all leaves of a table are heaps, and whether it has a key.

    What cannot be described fails later, as a backfill that says why.
    """
    try:
        described = describe_table(source, publication, table)
    except OperatorError:
        return True, True
    return all(leaf.is_heap for leaf in described.leaves), described.has_key


def _planned(
    sink: SinkConfig,
    table: TableName,
    published: Sequence[TableName],
    is_heap: bool,
    has_key: bool,
    *,
    replaced: bool,
) -> _Planned:
    whole = None if is_heap else "it is no heap, so its rows do not say who wrote them"
    if replaced:  # a stream goes on without its publication (Postgres 18)
        whole = "the publication was replaced, and cursors may have passed what was lost with it"
    if "delete" not in sink.actions:
        return _Planned(TableRepair(table, whole, "the sink takes no deletes (actions)"), False)
    kept = unreadable_reason(sink, table, published)
    if kept is None and not has_key:
        kept = "the table has no key"
    return _Planned(TableRepair(table, whole, kept), True)


def _refuse_unknown_deletes(tables: dict[str, list[_Planned]]) -> None:
    """Raise if deleted rows would stay at a destination without the operator's consent."""
    of_reason: dict[tuple[str, str], list[str]] = {}
    for sink, planned in tables.items():
        for each in planned:
            if each.wants_deletes and each.repair.kept_reason is not None:
                unknown = of_reason.setdefault((sink, each.repair.kept_reason), [])
                unknown.append(str(each.repair.table))
    if not of_reason:
        return
    listed = [
        f"of {_bounded(names)} for consumer {sink}: {why}"
        for (sink, why), names in of_reason.items()
    ]
    raise OperatorError(
        "rows that were deleted meanwhile cannot be found: " + _bounded(listed, "; "),
        fix="repair with --deletes=skip: where deleted rows cannot be found they stay "
        "at the destination, and the gap says so; nothing was changed yet",
        kind="deletes_unknown",
    )


def _bounded(names: Sequence[str], between: str = ", ") -> str:
    more = len(names) - _LISTED_MAX
    rest = f"{between}and {more:,} more" if more > 0 else ""
    return between.join(names[:_LISTED_MAX]) + rest


def _new_slot(source: Connection, database: Database, snapshots: StandbySnapshots | None) -> int:
    slot = database.slot.name
    try:
        source.execute(_DROP, (slot,))
    except psycopg.errors.ObjectInUse as error:
        raise SourceError(
            f"the slot {slot} is in use by another process and cannot be recreated",
            fix="stop whatever reads it (pg_replication_slots.active_pid), then repair again",
            kind="slot_busy",
        ) from error
    reached("slot_dropped")
    return create_slot(source, database.slot, snapshots=snapshots)
