"""A batch cut into stretches in which each target table has one version. Pure, whole columns.

A table is altered between two rows of the batch, so what was before must be applied first. Most
batches are one stretch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.change import ROUTE
from cdc.cursor import Cursor
from cdc.decoding.format import TABLE_VERSION
from cdc.decoding.row_texts import relation_of

_Codes = NDArray[np.int64]


TargetT = TypeVar("TargetT", bound=Hashable)
_NamedT_co = TypeVar("_NamedT_co", bound=Hashable, covariant=True)


class Names(Protocol[_NamedT_co]):
    """Which target the changes of a table go to."""

    def of(self, schema: str, table: str) -> _NamedT_co: ...
    def routed(self, route: str) -> _NamedT_co: ...


@dataclass(frozen=True)
class Part(Generic[TargetT]):
    """The rows of one target in a stretch, in order."""

    target: TargetT
    version: str  # as ``row_texts.version_text`` writes it
    routed: bool
    rows: pa.RecordBatch

    @property
    def first(self) -> Cursor:
        """The cursor of its first row."""
        lsn, idx = (self.rows.column(name)[0].as_py() for name in ("commit_lsn", "commit_idx"))
        return Cursor(lsn, idx)


def parts_by_version(
    rows: pa.RecordBatch, names: Names[TargetT], cuts: NDArray[np.int64] | None = None
) -> Iterator[list[Part[TargetT]]]:
    """The stretches of rows that all belong to tables, in order, each with its parts.

    ``cuts`` are more positions at which a stretch must end.
    """
    kinds, described = _kinds(rows, names)
    targets = list(dict.fromkeys(target for target, _, _ in described))
    target_of = np.array([targets.index(target) for target, _, _ in described], dtype=np.int64)
    ends = np.unique(np.concatenate([_version_cuts(kinds, target_of), _given(cuts), [len(kinds)]]))
    start = 0
    for end in ends.tolist():
        if end > start:
            yield _parts(rows.slice(start, end - start), kinds[start:end], described)
        start = end


def _kinds(
    rows: pa.RecordBatch, names: Names[TargetT]
) -> tuple[_Codes, list[tuple[TargetT, str, bool]]]:
    """A number per row, and the target, version and routing that each number stands for."""
    versions = pc.dictionary_encode(rows.column(TABLE_VERSION))
    codes = versions.indices.to_numpy().astype(np.int64)
    routes: list[str | None] = [None]
    if ROUTE in rows.schema.names:
        encoded = pc.dictionary_encode(rows.column(ROUTE), null_encoding="encode")
        routes = encoded.dictionary.to_pylist()
        codes = codes * len(routes) + encoded.indices.to_numpy().astype(np.int64)
    found, kinds = np.unique(codes, return_inverse=True)
    described = []
    for code in found.tolist():
        version, route = (
            versions.dictionary[code // len(routes)].as_py(),
            routes[code % len(routes)],
        )
        if route is None:
            relation = relation_of(version)
            described.append((names.of(relation.namespace, relation.name), version, False))
        else:
            described.append((names.routed(route), version, True))
    return kinds.astype(np.int64), described


def _version_cuts(kinds: _Codes, target_of: _Codes) -> _Codes:
    """Where a target's rows go on in another version."""
    if len(target_of) == len(np.unique(target_of)):
        return np.empty(0, np.int64)
    targets = target_of[kinds]
    order = np.argsort(targets, kind="stable")
    same_target = np.diff(targets[order]) == 0
    other_version = np.diff(kinds[order]) != 0
    cuts: _Codes = order[1:][same_target & other_version]
    return cuts


def _given(cuts: NDArray[np.int64] | None) -> _Codes:
    return np.empty(0, np.int64) if cuts is None else cuts


def _parts(
    rows: pa.RecordBatch, kinds: _Codes, described: list[tuple[TargetT, str, bool]]
) -> list[Part[TargetT]]:
    present = np.unique(kinds)
    if len(present) == 1:
        target, version, routed = described[int(present[0])]
        return [Part(target, version, routed, rows)]
    parts = []
    for kind in present.tolist():
        target, version, routed = described[kind]
        parts.append(Part(target, version, routed, rows.filter(pa.array(kinds == kind))))
    return parts
