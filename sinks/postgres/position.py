"""How far a consumer has come, as a row of the destination that moves with the data.

Invariants: the row is locked before anything is written and moves in the same transaction, so a
message at or below it is at the destination, and one above it is not. A process that is behind
another one finds what it brings below the row, and writes nothing. The row says whose it is and in
which mode, and no other consumer reads or moves it.

An epoch is the consumer's history between two rewinds. In a new epoch messages below the row come
again on purpose; a process of an epoch that is over is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
import pyarrow as pa
from psycopg import sql

from cdc.connection import Connection
from cdc.cursor import ORIGIN, Cursor, cursor_of, format_lsn
from cdc.errors import OperatorError, TransientError
from sinks.postgres.target import Target

_EPOCHS_MAX = 100  # so many that are over are known
_MAKING = 0x77616C62  # the advisory lock for making the tables

_EXISTS = "SELECT to_regclass(%s) IS NOT NULL"
_MAKE = """
CREATE SCHEMA IF NOT EXISTS {own};
CREATE TABLE IF NOT EXISTS {own}.positions (
    source      text NOT NULL,
    consumer    text NOT NULL,
    mode        text NOT NULL,
    commit_lsn  pg_lsn NOT NULL,
    commit_idx  bigint NOT NULL,
    generation  integer NOT NULL DEFAULT 1,
    repeats_lsn pg_lsn NOT NULL DEFAULT '0/0',
    repeats_idx bigint NOT NULL DEFAULT 0,
    epoch       text NOT NULL,
    past_epochs text[] NOT NULL DEFAULT '{{}}',
    shadows     jsonb NOT NULL DEFAULT '[]',
    moved_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, consumer)
);
COMMENT ON TABLE {own}.positions IS
    'Per consumer of Walbrook: everything up to this cursor is in its tables.';
CREATE TABLE IF NOT EXISTS {own}.tables (
    target_schema text NOT NULL,
    target_table  text NOT NULL,
    source        text NOT NULL,
    consumer      text NOT NULL,
    relation_oid  bigint NOT NULL,
    table_version text NOT NULL,
    since_lsn     pg_lsn NOT NULL,
    since_idx     bigint NOT NULL,
    routed        boolean NOT NULL,
    PRIMARY KEY (target_schema, target_table)
);
COMMENT ON TABLE {own}.tables IS
    'Per target table: whose it is, and which version of the source''s table it follows.';
CREATE TABLE IF NOT EXISTS {own}.gaps (
    source     text NOT NULL,
    consumer   text NOT NULL,
    commit_lsn pg_lsn NOT NULL,
    commit_idx bigint NOT NULL,
    gap        jsonb NOT NULL,
    noted_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, consumer, commit_lsn, commit_idx)
);
COMMENT ON TABLE {own}.gaps IS 'Changes that a consumer will never get, by their bounds.';
"""
_BEGIN = """
INSERT INTO {own}.positions (source, consumer, mode, commit_lsn, commit_idx, epoch)
VALUES (%s, %s, %s, '0/0', 0, %s) ON CONFLICT DO NOTHING
"""
_LOCK = """
SELECT mode, commit_lsn::text, commit_idx, repeats_lsn::text, repeats_idx, generation, epoch,
       %s = ANY (past_epochs), shadows
  FROM {own}.positions WHERE source = %s AND consumer = %s FOR UPDATE
"""
_HOLD = "SELECT FROM {own}.positions WHERE source = %s AND consumer = %s FOR UPDATE"
_MOVE = """
UPDATE {own}.positions SET commit_lsn = %s, commit_idx = %s, moved_at = clock_timestamp()
 WHERE source = %s AND consumer = %s
"""
_SAVE = "UPDATE {own}.positions SET shadows = %s::jsonb WHERE source = %s AND consumer = %s"
_NEXT_EPOCH = """
UPDATE {own}.positions
   SET past_epochs = (epoch || past_epochs)[1:%s], epoch = %s, generation = generation + 1,
       repeats_lsn = %s, repeats_idx = %s
 WHERE source = %s AND consumer = %s
"""
_GAP = """
INSERT INTO {own}.gaps (source, consumer, commit_lsn, commit_idx, gap)
VALUES (%s, %s, %s, %s, %s::jsonb) ON CONFLICT DO NOTHING
"""


@dataclass(frozen=True)
class Owner:
    """A consumer as the destination knows it."""

    source: str
    consumer: str

    def __str__(self) -> str:
        return f"{self.source}/{self.consumer}"


@dataclass(frozen=True)
class Shadow:
    """The shadow of a target, which is written from the source's table ``relation_oid``.

    What stands at or below ``begun`` is in the rows that are read, and never goes into it.
    """

    reload: int
    target: Target
    relation_oid: int
    place: Target
    begun: Cursor


def _shadows_in(saved: object) -> dict[Target, Shadow]:
    """What ``save_shadows`` wrote, by target."""
    assert isinstance(saved, list)
    found = [
        Shadow(reload, Target(*target), oid, Target(*place), Cursor.parse(begun))
        for reload, target, oid, place, begun in saved
    ]
    return {each.target: each for each in found}


@dataclass(frozen=True)
class PositionRow:
    """The row, locked; ``rewound``: this epoch is new, and messages from before come again.

    What comes again is at or below ``repeats``.
    """

    cursor: Cursor
    generation: int
    repeats: Cursor
    rewound: bool = False
    shadows: dict[Target, Shadow] = field(default_factory=dict)

    @property
    def absorbs(self) -> Cursor:
        """Messages at or below it are repeats."""
        return ORIGIN if self.rewound else self.cursor


class Positions:
    """The bookkeeping of one consumer, in its own schema of the destination."""

    def __init__(self, own_schema: str, owner: Owner, mode: str) -> None:
        self.schema = own_schema
        self._owner = owner
        self._mode = mode
        self.epoch = ""

    def statement(self, text: str) -> sql.Composed:
        """A statement in which ``{own}`` stands for the own schema."""
        return sql.SQL(text).format(own=sql.Identifier(self.schema))

    def make(self, connection: Connection) -> None:
        """Create what is missing of the own schema."""
        if self.exists(connection):
            return
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
            if not self.exists(connection):
                connection.execute(self.statement(_MAKE))

    def lock(self, connection: Connection) -> PositionRow:
        """Returns the position; no other process moves it until the transaction ends."""
        owner = (self._owner.source, self._owner.consumer)
        row = connection.execute(self.statement(_LOCK), (self.epoch, *owner)).fetchone()
        if row is None:
            connection.execute(self.statement(_BEGIN), (*owner, self._mode, self.epoch))
            row = connection.execute(self.statement(_LOCK), (self.epoch, *owner)).fetchone()
        assert row is not None
        mode, lsn, idx, repeats_lsn, repeats_idx, generation, epoch, is_over, saved = row
        self._refuse_other_mode(str(mode))
        repeats = cursor_of(repeats_lsn, repeats_idx)
        cursor = cursor_of(lsn, idx)
        shadows = _shadows_in(saved)
        position = PositionRow(cursor, int(str(generation)), repeats, shadows=shadows)
        if not self.epoch or epoch == self.epoch:
            return position
        if is_over:
            raise TransientError(
                f"the cursor of {self._owner} was moved back since this delivery began",
                fix="it begins again from there by itself",
            )
        repeats = max(repeats, cursor)
        connection.execute(
            self.statement(_NEXT_EPOCH),
            (_EPOCHS_MAX, self.epoch, format_lsn(repeats.lsn), repeats.idx, *owner),
        )
        rewound = cursor != ORIGIN
        return PositionRow(cursor, position.generation + 1, repeats, rewound, shadows)

    def hold(self, connection: Connection) -> None:
        """Keep others from delivering until the transaction ends."""
        owner = (self._owner.source, self._owner.consumer)
        connection.execute(self.statement(_HOLD), owner)

    def move(self, connection: Connection, cursor: Cursor) -> None:
        """Everything up to ``cursor`` is there once the transaction is committed."""
        place = (format_lsn(cursor.lsn), cursor.idx)
        connection.execute(
            self.statement(_MOVE), (*place, self._owner.source, self._owner.consumer)
        )

    def save_shadows(self, connection: Connection, shadows: Mapping[Target, Shadow]) -> None:
        """These shadows are there once the transaction is committed."""
        saved = [
            [each.reload, [each.target.schema, each.target.name], each.relation_oid,
             [each.place.schema, each.place.name], str(each.begun)]
            for each in shadows.values()
        ]  # fmt: skip
        owner = (self._owner.source, self._owner.consumer)
        connection.execute(self.statement(_SAVE), (orjson.dumps(saved).decode(), *owner))

    def note_gaps(self, connection: Connection, rows: pa.RecordBatch) -> None:
        """Record gaps in a table beside the rows; there are few."""
        names = ("commit_lsn", "commit_idx", "record")
        for lsn, idx, record in zip(*(rows.column(n).to_pylist() for n in names), strict=True):
            place = (self._owner.source, self._owner.consumer, format_lsn(lsn), idx)
            connection.execute(self.statement(_GAP), (*place, record))

    def exists(self, connection: Connection) -> bool:
        """Whether the own schema has been made."""
        name = sql.Identifier(self.schema, "gaps").as_string(connection)
        row = connection.execute(_EXISTS, (name,)).fetchone()
        return row is not None and bool(row[0])

    def _refuse_other_mode(self, mode: str) -> None:
        if mode != self._mode:
            raise OperatorError(
                f"{self._owner} has written to this database in mode {mode}, not {self._mode}",
                fix=f"set mode: {mode} again, or give the sink another name",
            )
