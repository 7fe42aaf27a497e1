"""Changes folded to the last per key have the effect of all of them, one after another."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.decoding.format import OLD_ROW_TEXT, ROW_TEXT, TABLE_VERSION
from cdc.decoding.row_texts import line_of, version_text
from sinks.tables.fold import count_rows, fold, moves_in_parts
from tests import pgoutput
from tests.examples import examples

_VERSION = version_text(
    pgoutput.relation(1, "public", "t", [("id", 23, True), ("a", 25), ("b", 25)])
)
_UNSENT = "unsent"
Row = tuple[str | None, ...]


@dataclass
class History:
    """Changes of one table, and what the table is before and after them."""

    rows: list[dict[str, str | None]] = field(default_factory=list)
    before: dict[str, Row] = field(default_factory=dict)
    after: dict[str, Row] = field(default_factory=dict)

    def add(
        self, action: str, row: Row | None = None, old: Row | None = None, unsent: str = ""
    ) -> None:
        sent = None if row is None else [None if v == _UNSENT else v for v in row]
        self.rows.append(
            {
                "action": action,
                "table_schema": "public",
                "table_name": "t",
                "record_pks": _key(row) if row is not None else "[]",
                "old_record_pks": None if old is None else _key(old),
                "unchanged": orjson.dumps(list(unsent)).decode() if unsent else None,
                ROW_TEXT: None if sent is None else line_of(sent),
                OLD_ROW_TEXT: None if old is None else line_of(old),
                TABLE_VERSION: _VERSION,
            }
        )

    def batch(self) -> pa.RecordBatch:
        names = list(self.rows[0])
        schema = pa.schema([pa.field(name, pa.string()) for name in names])
        return pa.RecordBatch.from_pylist(self.rows, schema)


def _key(row: Row) -> str:
    return orjson.dumps([row[0]]).decode()


_VALUE = st.sampled_from([None, "x", "y", "a\tb", "\\N", ""])


@st.composite
def _histories(draw: st.DrawFn) -> History:
    before = {k: (k, draw(_VALUE), draw(_VALUE)) for k in draw(st.sets(st.sampled_from("1234")))}
    history = History(before=dict(before), after=dict(before))
    table = history.after
    for _ in range(draw(st.integers(1, 14))):
        key = draw(st.sampled_from("1234"))
        kind = draw(st.sampled_from(["insert", "update", "update", "move", "delete", "truncate"]))
        if kind == "truncate" and draw(st.integers(0, 3)) == 0:
            table.clear()
            history.add("truncate")
        elif kind == "insert" and key not in table:
            table[key] = (key, draw(_VALUE), draw(_VALUE))
            history.add("insert", table[key])
        elif kind == "update" and key in table:
            unsent = "".join(draw(st.sets(st.sampled_from("ab"), max_size=2)))
            a = table[key][1] if "a" in unsent else draw(_VALUE)
            b = table[key][2] if "b" in unsent else draw(_VALUE)
            table[key] = (key, a, b)
            said = (
                key,
                *(_UNSENT if n in unsent else v for n, v in zip("ab", (a, b), strict=True)),
            )
            history.add("update", said, unsent=unsent)
        elif kind == "move" and key in table:
            other = draw(st.sampled_from("1234"))
            if other not in table:
                old = table.pop(key)
                table[other] = (other, draw(_VALUE), old[2])
                history.add("update", table[other], old=(key, None, None))
        elif kind == "delete" and key in table:
            del table[key]
            history.add("delete", (key, None, None))
    return history


def _read(line: str) -> Row:
    written = {"\\N": None, "a\\tb": "a\tb", "\\\\N": "\\N"}
    return tuple(written.get(part, part) for part in line.split("\t"))


@settings(max_examples=examples(150), deadline=None)
@given(_histories())
def test_the_fold_of_a_history_has_its_effect(history: History) -> None:
    if not history.rows:
        return
    assert not len(moves_in_parts(history.batch()))
    folded = fold(history.batch())
    table = {} if folded.truncated else dict(history.before)
    for line in folded.deletes.to_pylist():
        table.pop(str(_read(line)[0]), None)
    upserts = zip(folded.upserts.to_pylist(), folded.kept.to_pylist(), strict=True)
    for line, kept in upserts:
        row = _read(line)
        key = str(row[0])
        names = orjson.loads(kept) if kept else []
        had = table.get(key, row)
        table[key] = tuple(
            had[at] if name in names else row[at] for at, name in enumerate(("id", "a", "b"))
        )
    assert table == history.after
    assert len(set(folded.upserts.to_pylist())) == len(folded.upserts)


def test_updates_of_a_key_that_did_not_send_all_stand_apart_and_apart_from_each_other() -> None:
    history = History()
    history.add("insert", ("9", "x", "y"))
    for old, new in (("1", "2"), ("3", "4"), ("4", "5")):
        history.add("update", (new, "x", _UNSENT), old=(old, None, None), unsent="b")
    history.add("delete", ("9", None, None))
    # 1 to 2 and 3 to 4 go together; 4 to 5 must see what 3 became.
    assert sorted(set(moves_in_parts(history.batch()).tolist())) == [1, 3, 4]


def test_equal_rows_without_a_key_are_counted() -> None:
    history = History()
    for _ in range(3):
        history.add("insert", ("1", "x", None))
    history.add("delete", ("1", "x", None))
    history.add("delete", ("2", "y", None))
    history.add("delete", ("2", "y", None))
    history.add("update", ("3", "z", None), old=("2", "y", None))
    counted = count_rows(history.batch())
    assert counted.inserts.to_pylist() == ["1\tx\t\\N", "1\tx\t\\N", "3\tz\t\\N"]
    assert (counted.deletes.to_pylist(), counted.times.tolist()) == (["2\ty\t\\N"], [3])


def test_a_value_from_before_a_delete_is_not_taken_for_a_row_whose_insert_was_filtered_out() -> (
    None
):
    history = History()
    history.add("update", ("1", "x", "old"))
    history.add("delete", ("1", None, None))
    history.add("update", ("1", "new", _UNSENT), unsent="b")
    folded = fold(history.batch())
    assert folded.upserts.to_pylist() == ["1\tnew\t\\N"]
    assert folded.kept.to_pylist() == [None]
