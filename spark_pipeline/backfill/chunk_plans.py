"""The plans of one consumer's backfills: their chunks, and others when a table is altered.

Invariant: every leaf that a table has when its backfill ends was planned. A partition that was
attached meanwhile brings rows that never were changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import psycopg
import structlog

from cdc.backfill.ranges import BlockRange, GoneRows, Range, ReloadStep
from cdc.backfill.table import Leaf, PublishedTable, describe_table, published_tables, sent_as
from cdc.config import SinkConfig
from cdc.config.table import TableName
from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.state import backfill_chunks
from cdc.state import backfills as rows
from cdc.state.backfill_chunks import Chunk
from cdc.state.backfills import Backfill
from spark_pipeline.backfill.planning import Planned, block_bytes, plan_leaf, refuse_shared_target
from spark_pipeline.feed.stage_settings import StageSettings

_logger = structlog.get_logger("walbrook.backfill")

_SIZE = "SELECT pg_relation_size(%s::oid)"


class ChunkPlans:
    """Those of one consumer; ``connected`` gives a connection to its source."""

    def __init__(
        self,
        consumer: SinkConfig,
        settings: StageSettings,
        connected: Callable[[], psycopg.Connection[Any]],
    ) -> None:
        self._consumer, self._settings, self._connected = consumer, settings, connected
        self._source, self._term = settings.source, settings.term

    def expand(self, state: Connection) -> None:
        """A new consumer's tables, as its configuration names them, become backfills."""
        wanted = rows.initial_tables(state, self._source, self._consumer.name)
        if wanted is None:
            return
        there = published_tables(self._connected(), self._settings.publication)
        mine = [name for name in there if self._consumer.source.takes(name.schema, name.table)]
        if wanted != ["*"]:
            mine = [TableName.parse(name) for name in wanted]
        rows.add_initial(state, self._source, self._term, self._consumer.name, mine)

    def plan(self, state: Connection, backfill: Backfill) -> bool:
        """Plan all chunks. Returns False if backfills of the partitions take the place of this."""
        connection, publication = self._connected(), self._settings.publication
        names = sent_as(connection, publication, backfill.table)
        if names != [backfill.table]:
            rows.split_by_parts(state, self._source, self._term, backfill, names)
            return False
        if not self._consumer.source.takes(backfill.table.schema, backfill.table.table):
            raise OperatorError(
                f"consumer {self._consumer.name} takes no changes of {backfill.table}",
                fix="add the table to its source in the configuration, or cancel the backfill",
                kind="not_taken",
            )
        table = describe_table(connection, publication, backfill.table)
        planned: list[tuple[TableName, int, int, Range]] = []
        if backfill.reload:
            refuse_shared_target(connection, publication, self._consumer, backfill.table)
            planned.append((backfill.table, 0, 0, ReloadStep.BEGIN))
        if backfill.find_deletes:
            # First, so that a value that went to another row is free at the destination.
            planned.append((backfill.table, table.relation.oid, 0, GoneRows()))
        planned += self._of_leaves(backfill, table, table.leaves)
        size = sum(leaf.bytes for leaf in table.leaves)
        estimate = sum(leaf.rows for leaf in table.leaves)
        backfill_chunks.add_chunks(
            state, self._source, self._term, backfill.id, planned, planned=True,
            rows=estimate, size=size,
        )  # fmt: skip
        _logger.info(
            "backfill.planned", consumer=self._consumer.name, table=str(backfill.table),
            chunks=len(planned), bytes=size,
        )  # fmt: skip
        return True

    def plan_again(self, state: Connection, backfill: Backfill, chunk: Chunk) -> None:
        """The rows of a leaf lie elsewhere: all of it is read again, if the table still has it."""
        table = describe_table(self._connected(), self._settings.publication, backfill.table)
        mine = [
            leaf for leaf in table.leaves if leaf.oid == chunk.leaf_oid or leaf.name == chunk.leaf
        ]
        again = self._of_leaves(backfill, table, mine)
        backfill_chunks.replace_leaf(
            state, self._source, self._term, backfill.id, chunk.leaf_oid, again
        )
        _logger.info("backfill.planned_again", consumer=self._consumer.name, table=str(chunk.leaf))

    def plan_attached(self, state: Connection, backfill: Backfill) -> bool:
        """Plan the leaves that came since the plan was made; returns whether there are any."""
        known = backfill_chunks.planned_leaves(state, backfill.id)
        if known is None:
            return False
        table = describe_table(self._connected(), self._settings.publication, backfill.table)
        came = [leaf for leaf in table.leaves if leaf.oid not in known]
        planned = self._of_leaves(backfill, table, came)
        if planned:
            backfill_chunks.add_chunks(
                state, self._source, self._term, backfill.id, planned, planned=True
            )
        for leaf in came:
            _logger.info(
                "backfill.leaf_attached", consumer=self._consumer.name, table=str(leaf.name)
            )
        return bool(planned)

    def split(self, state: Connection, chunk: Chunk) -> bool:
        """Halve a range of blocks; returns whether it could be."""
        if not isinstance(chunk.range, BlockRange):
            return False
        first, end = chunk.range.first, chunk.range.end
        if end is None:
            connection = self._connected()
            row = connection.execute(_SIZE, (chunk.leaf_oid,)).fetchone()
            end = 0 if row is None else int(row[0]) // block_bytes(connection)
        if end - first < 2:
            return False
        middle = first + (end - first) // 2
        backfill_chunks.split_chunk(state, self._source, self._term, chunk, middle)
        return True

    def _of_leaves(
        self, backfill: Backfill, table: PublishedTable, leaves: Iterable[Leaf]
    ) -> list[Planned]:
        connection = self._connected()
        return [each for leaf in leaves for each in plan_leaf(connection, backfill, table, leaf)]
