"""What is left to do of the changes of one table: the last one per key. Pure, whole columns.

Invariants: applied in the order deletes, moves, upserts, the result has the effect of all changes
one after another; a value that the source did not send is taken from an earlier change of the same
row, or else kept as the destination has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.change import READ
from cdc.decoding.format import OLD_ROW_TEXT, ROW_TEXT, TABLE_VERSION
from cdc.decoding.joins import joined
from cdc.decoding.row_texts import relation_of
from cdc.decoding.types.objects import names_where

Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Folded:
    """Rows as ``row_text`` has them.

    ``kept`` is the JSON array of columns that an upsert must leave as they are, null for most.
    """

    truncated: bool
    deletes: pa.StringArray
    upserts: pa.StringArray
    kept: pa.StringArray


@dataclass(frozen=True)
class Counted:
    """The same of a table without a key: how often each row is to be added or removed."""

    truncated: bool
    deletes: pa.StringArray
    times: Positions  # of each delete
    inserts: pa.StringArray  # each as often as it is to be added


def moves_in_parts(rows: pa.RecordBatch) -> Positions:
    """Where to cut a batch so that updates of a key that did not send all values stand apart.

    The rest of such a row is at the destination, under its old key, so all that comes before must
    be applied first. Neighbours whose keys are all different are applied together.
    """
    if rows.column("old_record_pks").null_count == rows.num_rows:
        return np.empty(0, np.int64)
    moved = _valid(rows.column("old_record_pks")) & _valid(rows.column("unchanged"))
    cuts: list[int] = []
    used: set[tuple[str, str, str]] = set()
    last = -2
    for at in np.flatnonzero(moved).tolist():
        names = ("table_schema", "table_name", "record_pks", "old_record_pks")
        schema, table, new, old = (rows.column(name)[at].as_py() for name in names)
        keys = {(schema, table, new), (schema, table, old)}
        if at != last + 1 or keys & used:
            cuts += [last + 1] if last >= 0 else []
            cuts.append(at)
            used = set()
        used |= keys
        last = at
    return np.array([*cuts, *([last + 1] if last >= 0 else [])], dtype=np.int64)


def is_move(rows: pa.RecordBatch) -> bool:
    """Whether the rows of a stretch are such updates; then all of them are."""
    names = ("old_record_pks", "unchanged")
    return all(bool(rows.column(name)[0].is_valid) for name in names)


def fold(rows: pa.RecordBatch) -> Folded:
    """Inserts, updates, deletes and truncates of one table version that has a key."""
    truncated, rows = _behind_truncate(rows)
    count = rows.num_rows
    removes = _is(rows, "delete")
    old_keys = rows.column("old_record_pks")
    moved = np.flatnonzero(_valid(old_keys))
    # Each change is a step; a change of the key is two: its old key goes first.
    keys = rows.column("record_pks")
    steps, deletes = np.arange(count), removes
    if len(moved):
        keys = pa.concat_arrays([old_keys.take(pa.array(moved)), keys])
        order = np.argsort(np.concatenate([2 * moved, 2 * steps + 1]), kind="stable")
        keys = keys.take(pa.array(order))
        steps = np.concatenate([-1 - moved, steps])[order]  # negative: the old row of a change
        deletes = np.concatenate([np.ones(len(moved), bool), removes])[order]
    codes = pc.dictionary_encode(keys).indices.to_numpy()
    last = np.zeros(int(codes.max()) + 1 if len(codes) else 0, np.int64)
    last[codes] = np.arange(len(codes))  # of equal numbers the last one is kept
    last.sort()
    gone = steps[last[deletes[last]]]
    stay = last[~deletes[last]]
    text, kept = _whole(rows, codes, steps, deletes, stay)
    old_text = rows.column(OLD_ROW_TEXT)
    return Folded(
        truncated,
        pa.concat_arrays(
            [
                rows.column(ROW_TEXT).take(pa.array(gone[gone >= 0])),
                old_text.take(pa.array(-1 - gone[gone < 0])),
            ]
        ),
        text,
        kept,
    )


def count_rows(rows: pa.RecordBatch) -> Counted:
    """The same of a version whose rows are known by all their values."""
    truncated, rows = _behind_truncate(rows)
    removes = _is(rows, "delete")
    new, old = rows.column(ROW_TEXT), rows.column(OLD_ROW_TEXT)
    # An update without an old row has changed nothing.
    added = ~removes & (_valid(old) | _is(rows, "insert") | _is(rows, READ))
    lines = pa.concat_arrays(
        [new.filter(pa.array(added)), new.filter(pa.array(removes)), old.drop_null()]
    )
    encoded = pc.dictionary_encode(lines)
    signs = np.where(np.arange(len(lines)) < np.count_nonzero(added), 1, -1)
    net = np.bincount(encoded.indices.to_numpy(), signs, len(encoded.dictionary)).astype(np.int64)
    more, less = np.flatnonzero(net > 0), np.flatnonzero(net < 0)
    return Counted(
        truncated,
        encoded.dictionary.take(pa.array(less)),
        -net[less],
        encoded.dictionary.take(pa.array(np.repeat(more, net[more]))),
    )


def _behind_truncate(rows: pa.RecordBatch) -> tuple[bool, pa.RecordBatch]:
    """Whether the table was emptied, and what changed after that; changes of rows alone."""
    truncates = np.flatnonzero(_is(rows, "truncate"))
    if len(truncates):
        rows = rows.slice(int(truncates[-1]) + 1)
    changes = pc.is_valid(rows.column(ROW_TEXT))
    return bool(len(truncates)), rows if changes.true_count == len(changes) else rows.filter(
        changes
    )


def _whole(
    rows: pa.RecordBatch, codes: Positions, steps: Positions, deletes: Mask, stay: Positions
) -> tuple[pa.StringArray, pa.StringArray]:
    """The texts of the steps that stay, with unsent values from earlier steps of their keys.

    The second column names what even those have not sent.
    """
    texts = rows.column(ROW_TEXT).take(pa.array(steps[stay]))
    nothing = pa.nulls(len(stay), pa.string())
    unsent = rows.column("unchanged")
    lacking = np.flatnonzero(_valid(unsent)[steps[stay]])
    if not len(lacking):
        return texts, nothing
    names, missing = _missing(unsent)
    # The steps of the keys that lack something, key after key.
    concerned = np.flatnonzero(np.isin(codes, codes[stay[lacking]]))
    concerned = concerned[np.argsort(codes[concerned], kind="stable")]
    starts = np.searchsorted(codes[concerned], codes[concerned])
    at = np.flatnonzero(np.isin(concerned, stay[lacking]))
    which = np.searchsorted(stay, concerned[at])  # of the texts
    of_steps = np.maximum(steps[concerned], 0)
    parts = split_columns(rows.column(ROW_TEXT).take(pa.array(of_steps)))
    masks = []
    for place, mask in zip(_places(rows, names), missing, strict=True):
        sent = ~mask[of_steps] | deletes[concerned]
        latest = np.maximum.accumulate(np.where(sent, np.arange(len(concerned)), -1))[at]
        is_kept = latest < starts[at]
        chosen = np.where(is_kept | deletes[concerned][latest], at, latest)
        values = parts[place]
        column = np.arange(len(concerned))
        column[at] = chosen
        parts[place] = values.take(pa.array(column))
        kept = np.zeros(len(stay), bool)
        kept[which] = is_kept
        masks.append(kept)
    mended = join_columns([part.take(pa.array(at)) for part in parts])
    where = np.zeros(len(stay), bool)
    where[which] = True
    order = np.argsort(which)
    texts = pc.replace_with_mask(texts, pa.array(where), mended.take(pa.array(order)))
    quoted = [orjson.dumps(name).decode() for name in names]
    return texts, names_where(list(zip(quoted, masks, strict=True)), len(stay))


def _missing(unsent: pa.StringArray) -> tuple[list[str], list[Mask]]:
    """The columns that some row did not send, and where."""
    encoded = pc.dictionary_encode(unsent, null_encoding="encode")
    sets = [set(orjson.loads(text)) if text else set() for text in encoded.dictionary.to_pylist()]
    names = sorted(set().union(*sets))
    indices = encoded.indices.to_numpy()
    return names, [np.array([name in one for one in sets])[indices] for name in names]


def _places(rows: pa.RecordBatch, names: list[str]) -> list[int]:
    """Where columns stand in the texts of the rows."""
    relation = relation_of(rows.column(TABLE_VERSION)[0].as_py())
    positions = {column.name: at for at, column in enumerate(relation.columns)}
    return [positions[name] for name in names]


def split_columns(texts: pa.StringArray) -> list[pa.StringArray]:
    """The columns of some rows of one version; a tab within a value is written otherwise."""
    lists = pc.split_pattern(texts, "\t")
    width = len(lists[0]) if len(lists) else 0
    values = lists.flatten()
    starts = np.arange(len(texts)) * width
    return [values.take(pa.array(starts + at)) for at in range(width)]


def join_columns(columns: list[pa.StringArray]) -> pa.StringArray:
    """The texts of rows again."""
    parts: list[str | pa.StringArray] = []
    for column in columns:
        parts += [column, "\t"]
    return joined(*parts[:-1])


def _valid(column: pa.Array) -> Mask:
    mask: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return mask


def _is(rows: pa.RecordBatch, action: str) -> Mask:
    mask: Mask = pc.equal(rows.column("action"), action).to_numpy(zero_copy_only=False)
    return mask
