"""The text of event times beside decoded changes, and messages that go out in another order."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from cdc.change import CHANGE_SCHEMA, PLACED_SCHEMA
from cdc.decoding import decode_changes
from cdc.decoding.format import ValueFormat, Wanted
from cdc.decoding.shapes import Context, ShapeName, shape_for
from spark_pipeline.delivery.merged_shape import SOURCE, MergedShape
from tests import pgoutput
from tests.unit.decoding.changes_of_every_kind import changes_of_every_kind
from tests.unit.decoding.frames import OID, Frame

pytestmark = pytest.mark.usefixtures("both_ways")

ITEM = pgoutput.relation(OID, "public", "item", [("id", 23, True), ("at", 1184)])
OTHER = pgoutput.relation(OID + 1, "public", "other", [("id", 23, True), ("made", 25)])
NOON = "2026-01-01 12:00:00+00"


def texts(frame: Frame, *times: str) -> list[list[str | None]]:
    """The texts of each of these columns, as a consumer sees them that asks for it alone."""
    wanted = Wanted(times=times)
    changes = decode_changes(frame.batch(), frame.schemas, wanted=wanted)
    changes.validate(full=True)
    assert changes.schema.names == wanted.schema.names
    assert wanted.view(changes, ValueFormat()).schema.names == CHANGE_SCHEMA.names
    views = [wanted.view(changes, ValueFormat(), [name]) for name in times]
    return [
        view.column(wanted.time_name(name)).to_pylist()
        for view, name in zip(views, times, strict=True)
    ]


def test_the_columns_that_are_named_come_as_the_source_wrote_them() -> None:
    frame = Frame().add(pgoutput.insert(OID, ["1", NOON]), ITEM)
    frame.add(pgoutput.insert(OID + 1, ["2", "noon"]), OTHER, oid=OID + 1)
    frame.add(pgoutput.update(OID, ["1", None]), ITEM)
    frame.add(pgoutput.truncate([OID]), ITEM)
    assert texts(frame, "at", "made") == [[NOON, "", None, None], ["", "noon", "", None]]


def test_a_table_without_the_column_says_so_by_an_empty_text() -> None:
    frame = Frame().add(pgoutput.insert(OID + 1, ["2", "noon"]), OTHER, oid=OID + 1)
    assert texts(frame, "at") == [[""]]


def test_wanted_event_times_pass_where_only_text_can() -> None:
    wanted = Wanted(before=True, times=("at", "made"))
    assert Wanted.from_text(wanted.to_text()) == wanted


def placed(changes: pa.RecordBatch) -> pa.RecordBatch:
    """Changes under numbers of their own."""
    count = changes.num_rows
    columns = [
        changes.column("commit_lsn"),
        changes.column("commit_idx"),
        pa.array([None, *[f'"{n}"' for n in range(1, count)]]),
        pa.array(["true", *[None] * (count - 1)]),
    ]
    for field, column in zip(PLACED_SCHEMA, columns, strict=True):
        changes = changes.append_column(field.name, column)
    numbers = pa.array(np.arange(count))
    for name, column in (("commit_lsn", pa.array(np.full(count, 11))), ("commit_idx", numbers)):
        at = changes.schema.get_field_index(name)
        changes = changes.set_column(at, changes.schema.field(at), column)
    return changes


@pytest.mark.parametrize(("name", "where"), [("sequin", "metadata"), ("debezium", "source")])
def test_a_message_with_a_number_says_where_it_comes_from_and_when_it_happened(
    name: ShapeName, where: str
) -> None:
    plain, numbered = changes_of_every_kind(), placed(changes_of_every_kind())
    shape = shape_for(name, Context("search", "main", "h", "shop", now_ns=1))
    before = [json.loads(t) for t in shape.messages(shape.rows(plain)).to_pylist()]
    after = [json.loads(t) for t in shape.messages(shape.rows(numbered)).to_pylist()]
    for at, (one, other) in enumerate(zip(before, after, strict=True)):
        added = {"sequence": f"11-{at}"}
        added |= {"event_time": str(at)} if at else {"late": True}  # type: ignore[dict-item]
        one[where] |= added
        assert other == one
    assert shape.rows(numbered).column("commit_lsn").to_pylist() == [11] * len(after)


@pytest.mark.parametrize("name", ["sequin", "debezium", "record"])
def test_messages_of_two_databases_each_name_their_own(name: ShapeName) -> None:
    shapes = [
        shape_for(name, Context("c", each, "h", f"db_{each}", now_ns=1, of_many=True))
        for each in ("a", "b")
    ]
    changes = placed(changes_of_every_kind())
    codes = np.arange(changes.num_rows, dtype=np.int32) % 2
    merged = MergedShape(shapes)
    rows = merged.rows(changes.append_column(SOURCE, pa.array(codes)))
    alone = [shape.fields(shape.rows(changes)) for shape in shapes]
    texts = [shape.messages(shape.rows(changes)).to_pylist() for shape in shapes]
    fields = merged.fields(rows)
    for at, code in enumerate(codes.tolist()):
        assert merged.messages(rows)[at].as_py() == texts[code][at]
        for key, column in fields.items():
            assert column[at].as_py() == alone[code][key][at].as_py()
    metadata = [json.loads(text) for text in fields["metadata"].to_pylist()]
    assert [each["database_name"] for each in metadata] == ["ab"[code] for code in codes.tolist()]
    assert all(each["idempotency_key"].startswith(each["database_name"]) for each in metadata)
