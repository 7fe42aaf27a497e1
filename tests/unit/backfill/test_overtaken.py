"""What is left of a chunk behind newer changes, against a model that replays them on a table.

The model is a table of rows. A reader who applies every change as it comes, and then what is left
of the chunk, must have the same rows as the table: nothing old, nothing missing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pyarrow as pa
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cdc.backfill.copy_rows import columns_of, raw_rows
from cdc.backfill.overtaken import NewerChanges, cells_of, remaining
from cdc.decoding import decode_changes
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.frames import OID, Frame

RELATION = pgoutput.relation(OID, "public", "docs", [("id", 23, True), ("note", 25), ("body", 25)])
SCHEMA_ID = xxhash.xxh3_64_intdigest(RELATION)
SCHEMAS = {SCHEMA_ID: RELATION}
Row = tuple[str, str]


@dataclass
class Chunk:
    """Rows that were read, as messages."""

    raw: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.raw.num_rows)

    @property
    def nbytes(self) -> int:
        return int(self.raw.nbytes)


def chunk(rows: dict[int, Row]) -> Chunk:
    text = "".join(f"{key}\t{note}\t{body}\n" for key, (note, body) in rows.items())
    columns = columns_of(text.encode(), 3)
    return Chunk(raw_rows(columns, oid=OID, schema_id=SCHEMA_ID, read_us=1))


@dataclass
class Table:
    """Rows by key, and the changes that were made to them as pgoutput tells them."""

    rows: dict[int, Row]
    changes: Frame = field(default_factory=Frame)

    def insert(self, key: int, note: str, body: str) -> None:
        if key not in self.rows:
            self.rows[key] = (note, body)
            self.changes.add(pgoutput.insert(OID, [str(key), note, body]), RELATION)

    def update(self, key: int, note: str, body: str | None, moves_to: int | None) -> None:
        """Without ``body`` its TOAST value stays and is not sent."""
        if key not in self.rows or moves_to in self.rows:
            return
        to = key if moves_to is None else moves_to
        kept = self.rows.pop(key)[1]
        self.rows[to] = (note, kept if body is None else body)
        old = None if to == key else [str(key), None, None]
        sent = UNCHANGED if body is None else body
        self.changes.add(pgoutput.update(OID, [str(to), note, sent], key=old), RELATION)

    def delete(self, key: int) -> None:
        if self.rows.pop(key, None) is not None:
            self.changes.add(pgoutput.delete(OID, key=[str(key), None, None]), RELATION)


@dataclass
class Destination:
    """Applies messages to rows by key; what a change leaves out is kept if it is known."""

    rows: dict[str, dict[str, object]] = field(default_factory=dict)

    def take(self, changes: pa.RecordBatch) -> None:
        for change in changes.to_pylist():
            key, old = change["record_pks"], change["old_record_pks"] or change["record_pks"]
            before = self.rows.pop(old, {})
            if change["action"] == "delete":
                continue
            record = json.loads(change["record"])
            for name in json.loads(change["unchanged"] or "[]"):
                record[name] = before.get(name, "not known")
            self.rows[key] = record


_KEYS = st.integers(0, 5)
_TEXTS = st.text("ab\\\n\t", max_size=3)
_ACTS = st.one_of(
    st.tuples(st.just("insert"), _KEYS, _TEXTS, _TEXTS),
    st.tuples(
        st.just("update"), _KEYS, _TEXTS, st.none() | st.text("xy", min_size=1, max_size=3),
        st.none() | _KEYS,
    ),
    st.tuples(st.just("delete"), _KEYS),
)  # fmt: skip


@given(
    st.dictionaries(_KEYS, st.tuples(st.text("ab", max_size=2), st.text("cd", min_size=1))),
    st.lists(_ACTS, max_size=12),
)
def test_changes_and_what_is_left_of_a_chunk_give_the_table(
    read: dict[int, Row], acts: list[tuple[object, ...]]
) -> None:
    table = Table(dict(read))
    for name, *arguments in acts:
        getattr(table, str(name))(*arguments)
    newer = NewerChanges(table.changes.batch(), table.changes.schemas)
    left = remaining(chunk(read), SCHEMAS, newer)
    destination = Destination()
    if newer.raw.num_rows:
        destination.take(decode_changes(newer.raw, newer.schemas))
    if left.rows.num_rows:
        destination.take(decode_changes(left.rows, SCHEMAS))
    expected = {
        f'["{key}"]': {"id": key, "note": note, "body": body}
        for key, (note, body) in table.rows.items()
    }
    assert destination.rows == expected
    assert len(left.ordinals) == left.rows.num_rows == len(read) - left.dropped


def test_a_row_whose_toast_value_a_change_left_out_is_merged() -> None:
    table = Table({1: ("old", "long"), 2: ("old", "other")})
    table.update(1, "new", None, None)
    table.delete(2)
    newer = NewerChanges(table.changes.batch(), table.changes.schemas)
    left = remaining(chunk({1: ("old", "long"), 2: ("old", "other")}), SCHEMAS, newer)
    (row,) = decode_changes(left.rows, SCHEMAS).to_pylist()
    assert (row["action"], json.loads(row["record"])) == (
        "read", {"id": 1, "note": "new", "body": "long"},
    )  # fmt: skip
    assert (left.dropped, [*left.merged], left.ordinals.tolist()) == (1, [0], [0])


def test_a_row_that_a_standby_gave_under_its_new_key_is_merged() -> None:
    table = Table({1: ("old", "long"), 3: ("old", "other")})
    table.update(1, "new", None, 2)
    read = dict(table.rows)  # contains the change, which counts as newer all the same
    table.insert(1, "again", "short")
    newer = NewerChanges(table.changes.batch(), table.changes.schemas)
    left = remaining(chunk(read), SCHEMAS, newer)
    rows = decode_changes(left.rows, SCHEMAS).to_pylist()
    assert {row["record_pks"]: json.loads(row["record"])["body"] for row in rows} == {
        '["2"]': "long", '["3"]': "other",
    }  # fmt: skip


def test_a_truncate_takes_all_rows_that_were_read_before_it() -> None:
    newer = Frame().add(pgoutput.truncate([OID]), RELATION)
    left = remaining(chunk({1: ("a", "b")}), SCHEMAS, NewerChanges(newer.batch(), newer.schemas))
    assert (left.rows.num_rows, left.dropped) == (0, 1)


def test_rows_without_a_key_stay() -> None:
    keyless = pgoutput.relation(OID, "public", "docs", [("id", 23), ("note", 25), ("body", 25)])
    schema_id = xxhash.xxh3_64_intdigest(keyless)
    rows = raw_rows(columns_of(b"1\ta\tb\n", 3), oid=OID, schema_id=schema_id, read_us=1)
    newer = Frame().add(pgoutput.insert(OID, ["1", "a", "b"]), keyless)
    left = remaining(Chunk(rows), {schema_id: keyless}, NewerChanges(newer.batch(), newer.schemas))
    assert left.rows.num_rows == 1


def test_the_values_of_an_update_are_those_of_its_new_tuple() -> None:
    message = pgoutput.update(OID, ["2", UNCHANGED], key=["1", None])
    assert cells_of(message) == [b"t\0\0\0\x012", b"u"]
