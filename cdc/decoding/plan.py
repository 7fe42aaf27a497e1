"""How the rows of one table version are decoded: worked out once from its Relation message."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import orjson

from cdc.decoding.format import ValueFormat
from cdc.decoding.relation import Relation, parse_relation
from cdc.decoding.row_texts import version_text
from cdc.decoding.types import TypeForm, type_form

_PLANS_MAX = 4096


@dataclass(frozen=True)
class TablePlan:
    """A table version with all that does not depend on its rows."""

    relation: Relation
    names: tuple[str, ...]
    json_names: tuple[str, ...]  # quoted and escaped
    types: tuple[TypeForm, ...]
    identity: tuple[int, ...]  # positions of the columns that an old key ('K') carries
    # What ``connect`` has written of it, one text per form that is asked for.
    described: dict[ValueFormat, str] = field(default_factory=dict, compare=False, repr=False)
    version: str = ""  # the Relation message as ``row_texts`` writes it


@lru_cache(maxsize=_PLANS_MAX)
def plan_for(message: bytes) -> TablePlan:
    """The plan for the table version that a raw Relation message describes."""
    relation = parse_relation(message)
    names = tuple(column.name for column in relation.columns)
    return TablePlan(
        relation,
        names,
        tuple(orjson.dumps(name).decode() for name in names),
        _types(relation),
        tuple(index for index, column in enumerate(relation.columns) if column.is_key),
        version=version_text(message),
    )


def _types(relation: Relation) -> tuple[TypeForm, ...]:
    catalog = relation.catalog
    dimensions = catalog.dimensions or (0,) * len(relation.columns)
    return tuple(
        type_form(column.type_oid, column.typmod, notes=catalog.types, dimensions=declared)
        for column, declared in zip(relation.columns, dimensions, strict=True)
    )
