"""One broken message costs itself, not its frame."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.decoding import decode_changes
from cdc.decoding.format import ValueFormat, Wanted
from cdc.decoding.isolate import BAD_MAX, decode_carefully
from cdc.errors import DecodeError
from cdc.replication.wire.seal import Sealer
from tests import pgoutput
from tests.wire_messages import transaction, wire

pytestmark = pytest.mark.usefixtures("both_ways")

ITEM = pgoutput.relation(1, "public", "item", [("id", 23, True), ("name", 25)])


def _frame(rows: int) -> tuple[pa.RecordBatch, dict[int, bytes]]:
    changes = [pgoutput.insert(1, [str(number), "n"]) for number in range(rows)]
    sealed = Sealer().seal(wire(ITEM, *transaction(0x100, *changes)))
    assert sealed is not None
    return sealed.raw, dict(sealed.schemas)


def _broken(raw: pa.RecordBatch, bad: set[int]) -> pa.RecordBatch:
    payloads = [
        payload[:-2] if at in bad else payload
        for at, payload in enumerate(raw.column("payload").to_pylist())
    ]
    place = raw.schema.get_field_index("payload")
    return raw.set_column(place, raw.schema.field(place), pa.array(payloads, pa.binary()))


@given(st.integers(1, 60), st.data())
def test_every_row_is_there_and_only_the_broken_ones_have_errors(
    rows: int, data: st.DataObject
) -> None:
    raw, schemas = _frame(rows)
    bad = data.draw(st.sets(st.integers(0, rows - 1), max_size=BAD_MAX))
    said = pa.array([f'"{at}"' for at in range(rows)])
    wanted = Wanted((ValueFormat(), ValueFormat(numbers="string")), before=True)
    whole = decode_changes(raw, schemas, annotations=said, wanted=wanted).to_pylist()
    found = decode_carefully(_broken(raw, bad), schemas, annotations=said, wanted=wanted)
    for at, (expected, row) in enumerate(zip(whole, found.to_pylist(), strict=True)):
        if at not in bad:
            assert row == expected
            continue
        assert row.pop("error").startswith("cannot decode the change at 0/100:")
        kept = ("commit_lsn", "commit_idx", "commit_timestamp", "xid", "annotations", "action",
                "table_schema", "table_name")  # fmt: skip
        assert {name: row[name] for name in kept} == {name: expected[name] for name in kept}
        assert row["record"] is None


def test_a_frame_with_too_many_broken_messages_is_refused_as_a_whole() -> None:
    raw, schemas = _frame(100)
    with pytest.raises(DecodeError, match="0/100:0"):
        decode_carefully(_broken(raw, set(range(BAD_MAX + 1))), schemas)
    with pytest.raises(DecodeError, match="not among"):
        decode_carefully(raw, {})
