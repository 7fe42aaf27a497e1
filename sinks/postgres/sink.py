"""One delivery, one transaction: the position is locked, the rows are applied, the position moves.

A message that the destination refuses is found by bisection of the batch: each half is a delivery
of its own, and the first message that is refused alone ends it. After some refusals in a row, with
nothing accepted between them, the destination is taken to be at fault, and the next message waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, Protocol

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.conninfo import conninfo_to_dict

from cdc.backfill.reload import mark_in
from cdc.backfill.table import PublishedTable
from cdc.change import MessageBatch
from cdc.connection import LIVENESS, Connection, with_options
from cdc.cursor import Cursor
from cdc.cursor_columns import cursor_at, prefix_at_or_below
from cdc.decoding.format import TABLE_VERSION
from cdc.errors import OperatorError, PoisonError, TransientError, WalbrookError
from cdc.failpoints import reached
from cdc.verify.held import Form, Key
from sinks.base import Delivery
from sinks.postgres.errors import from_postgres, is_of_a_row
from sinks.postgres.events import Events, Span, table_of_events
from sinks.postgres.history import History
from sinks.postgres.mirror import SETTINGS, Mirror
from sinks.postgres.position import Owner, PositionRow, Positions
from sinks.postgres.read_back import held_rows
from sinks.postgres.reloading import Shadows
from sinks.postgres.rights import rights_found
from sinks.postgres.tables import Tables
from sinks.postgres.target import TargetNames

Mode = Literal["mirror", "append", "events"]

_REFUSALS_MAX = 5  # in a row

_PINNED = {
    # The texts of values are read as the source wrote them.
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    # What is delivered is on the destination's disk, whatever the server does for others.
    "synchronous_commit": "on",
    **SETTINGS,
}


class _Applies(Protocol):
    """What a mode does with rows."""

    def begin_again(self, connection: Connection, first: Cursor) -> None: ...
    def apply(
        self, connection: Connection, rows: pa.RecordBatch, position: PositionRow
    ) -> None: ...
    def forget(self) -> None: ...


class PostgresSink:
    """Writes over one connection, opened when it is first needed."""

    def __init__(
        self,
        dsn: str,
        *,
        source: str,
        consumer: str,
        mode: Mode = "mirror",
        table: str | None = None,
        target_schema: str | None = None,
        own_schema: str = "walbrook_sink",
        on_rewind: Literal["generation", "replace"] = "generation",
        partition_by: Span = "day",
        retention_days: int | None = None,
        disable_triggers: bool = False,
        connect_timeout_s: float = 10.0,
        statement_timeout_s: float = 60.0,
    ) -> None:
        self._dsn = dsn
        self._consumer = consumer
        self._connect_timeout_s = connect_timeout_s
        timeout = f"{round(statement_timeout_s * 1000)}ms"
        self._settings = _PINNED | {
            "statement_timeout": timeout,
            "idle_in_transaction_session_timeout": timeout,
            **({"session_replication_role": "replica"} if disable_triggers else {}),
        }
        owner = Owner(source, consumer)
        self._names = names = TargetNames(table or "{schema}.{table}", target_schema)
        replaces = on_rewind == "replace"
        self._mode = mode
        self._target_schema = target_schema
        self._positions = Positions(own_schema, owner, mode)
        self._events: Events | None = None
        self._shadows: Shadows | None = None
        self._applies: _Applies
        if mode == "events":
            self._applies = self._events = Events(
                self._positions, owner, table_of_events(target_schema, table),
                span=partition_by, retention_days=retention_days, replaces=replaces,
            )  # fmt: skip
        else:
            tables = Tables(self._positions, owner, names, history=mode == "append")
            self._shadows = shadows = Shadows(
                self._positions, owner, tables, names, history=mode == "append"
            )
            self._applies = (
                Mirror(tables, names, shadows)
                if mode == "mirror"
                else History(tables, names, self._positions, owner, shadows, replaces=replaces)
            )
        self._connection: Connection | None = None
        self._refusals = 0  # since a message was accepted

    def follow(self, epoch: str) -> None:
        """Deliver in this epoch of the consumer: another one says that its cursor went back."""
        self._positions.epoch = epoch

    def loading(self, reload: int | None) -> None:
        """Rows of the action ``read`` are those of this reload."""
        if self._shadows is not None:
            self._shadows.loading = reload

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Apply the messages that are not there yet, in order."""
        settled = absorbed = 0
        top: Cursor | None = None
        try:
            connection = self._connected()

            def attempt(part: MessageBatch) -> tuple[PositionRow, int]:
                return self._apply_or_refuse(connection, part)

            for part, result in batch.bisect(attempt, PoisonError):
                if isinstance(result, PoisonError):
                    return Delivery(settled, absorbed, self._refused(part, result), top=top)
                position, known = result
                top = position.cursor if top is None else top
                settled, absorbed = settled + len(part), absorbed + known
                self._refusals = 0 if known < len(part) else self._refusals
            if self._events is not None:
                self._events.upkeep(connection)
        except psycopg.Error as error:
            self.close()
            return Delivery(settled, absorbed, from_postgres(error, self._place), top=top)
        except WalbrookError as error:
            self.close()
            return Delivery(settled, absorbed, error, top=top)
        except BaseException:
            self.close()
            raise
        return Delivery(settled, absorbed, top=top)

    def probe(self) -> str:
        """Connect, authenticate and ask for the right to make tables; nothing is written."""
        try:
            with self._connect() as connection:
                return rights_found(connection, self._positions, self._target_schema)
        except psycopg.Error as error:
            raise from_postgres(error, self._place) from error

    @property
    def held_form(self) -> Form:
        return Form.CELLS

    def read_back(
        self, table: PublishedTable, keys: Collection[Key] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a mirrored table, over a connection of its own."""
        if self._mode != "mirror":
            raise OperatorError(
                f"a postgres sink in mode {self._mode} holds a history, not rows",
                fix="compare a sink in mode: mirror",
                kind="not_readable",
            )
        target = self._names.of(table.name.schema, table.name.table)
        try:
            with self._connect() as connection:
                yield from held_rows(connection, target, table, keys)
        except psycopg.Error as error:
            raise from_postgres(error, self._place) from error

    def close(self) -> None:
        """Hang up; the next delivery connects again."""
        connection, self._connection = self._connection, None
        self._applies.forget()
        if connection is not None:
            connection.close()

    def _connected(self) -> Connection:
        if self._connection is None:
            connection = self._connect()
            try:
                self._positions.make(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _connect(self) -> Connection:
        return psycopg.connect(
            self._dsn,
            autocommit=True,
            **LIVENESS
            | {
                "application_name": f"walbrook:{self._consumer}",
                "connect_timeout": max(2, round(self._connect_timeout_s)),
                "options": with_options(self._dsn, self._settings),
            },
        )

    def _apply_or_refuse(
        self, connection: Connection, batch: MessageBatch
    ) -> tuple[PositionRow, int]:
        """``_apply``, with a PoisonError for what is a row's own fault."""
        try:
            return self._apply(connection, batch)
        except psycopg.Error as error:
            if not is_of_a_row(error):
                raise
            self._forget(connection)
            raise from_postgres(error, self._place) from error
        except PoisonError:
            self._forget(connection)
            raise

    def _apply(self, connection: Connection, batch: MessageBatch) -> tuple[PositionRow, int]:
        """One transaction; returns the position before it and how many messages were there."""
        with connection.transaction():
            position = self._positions.lock(connection)
            known = prefix_at_or_below(batch.rows, position.absorbs)
            rest = batch.slice(known)
            if len(rest):
                if position.rewound:
                    self._applies.begin_again(connection, rest.cursor(0))
                self._apply_rows(connection, rest.rows, position)
                reached("applied")
                self._positions.move(connection, rest.cursor(-1))
        reached("moved")
        return position, known

    def _apply_rows(
        self, connection: Connection, rows: pa.RecordBatch, position: PositionRow
    ) -> None:
        if self._shadows is not None and (mark := mark_in(rows)) is not None:
            self._shadows.take(connection, mark, cursor_at(rows, 0), position)
            return
        if self._mode == "events":
            self._applies.apply(connection, rows, position)
            return
        gaps = pc.equal(rows.column("action"), "gap")
        if gaps.true_count:
            self._positions.note_gaps(connection, rows.filter(gaps))
            rows = rows.filter(pc.invert(gaps))
        if rows.num_rows:
            assert TABLE_VERSION in rows.schema.names
            self._applies.apply(connection, rows, position)

    def _forget(self, connection: Connection) -> None:
        """A transaction was rolled back: so were the tables that it made."""
        self._applies.forget()
        if not connection.closed:
            connection.execute("DISCARD TEMP")

    def _refused(self, message: MessageBatch, found: PoisonError) -> WalbrookError:
        self._refusals += 1
        if self._refusals > _REFUSALS_MAX:
            return TransientError(
                f"it refused {self._refusals} messages in a row and took none: {found.what}",
                fix="change what refuses them at the destination; it is tried again until then",
                detail=found.detail,
            )
        return PoisonError(
            f"the message at {message.cursor(0)} cannot be applied: {found.what}",
            fix=found.fix,
            detail=found.detail,
        )

    @property
    def _place(self) -> str:
        """The destination without its secrets."""
        said = conninfo_to_dict(self._dsn)
        host, database = (
            said.get("host") or "the local server",
            said.get("dbname") or "its database",
        )
        return f"the database {database} on {host}"
