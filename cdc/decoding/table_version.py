"""A version of a table: what it looks like, since which change, and what it changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import orjson
import xxhash

from cdc.cursor import Cursor, place_before
from cdc.decoding.relation import Relation, parse_relation
from cdc.decoding.schema_change import change_between


@dataclass(frozen=True)
class TableVersion:
    """``record`` is that of its schema change; the first version of a table has none."""

    number: int
    schema: bytes  # the Relation message as the log keeps it
    since: Cursor  # of its first row
    commit_ts: int  # of that row's transaction, Unix microseconds
    record: bytes | None

    @classmethod
    def first(cls, schema: bytes, since: Cursor, commit_ts: int) -> TableVersion:
        return cls(1, schema, since, commit_ts, None)

    def next(self, schema: bytes, since: Cursor, commit_ts: int) -> TableVersion:
        """The version that follows this one."""
        number = self.number + 1
        change = change_between(self.relation, parse_relation(schema), number)
        return TableVersion(number, schema, since, commit_ts, record_of(change))

    @cached_property
    def relation(self) -> Relation:
        return parse_relation(self.schema)

    @cached_property
    def schema_id(self) -> int:
        return xxhash.xxh3_64_intdigest(self.schema)

    @property
    def place(self) -> Cursor:
        """Where its schema change stands."""
        return place_before(self.since)


def record_of(change: object) -> bytes:
    """A record as the log has it; sorted, because ``jsonb``, which keeps it too, has no order."""
    return orjson.dumps(change, option=orjson.OPT_SORT_KEYS)
