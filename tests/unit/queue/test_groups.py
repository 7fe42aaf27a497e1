"""Messages of one group share a number, others do not, whatever stands beside them."""

from __future__ import annotations

import numpy as np
import orjson
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cdc.queue.groups import BY_KEY, Grouping, group_ids, groups_of, text_hashes

Row = tuple[str, str, dict[str, object] | None, dict[str, object] | None, str]


def rows(*given: Row) -> pa.RecordBatch:
    """Each a table, a key, a record, what changed, an action."""
    columns = {
        "table_schema": ["public"] * len(given),
        "table_name": [row[0] for row in given],
        "record_pks": [orjson.dumps([row[1]]).decode() for row in given],
        "record": [None if row[2] is None else orjson.dumps(row[2]).decode() for row in given],
        "changes": [None if row[3] is None else orjson.dumps(row[3]).decode() for row in given],
        "action": [row[4] for row in given],
        "old_record_pks": [None] * len(given),
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(values, pa.string()) for values in columns.values()], names=list(columns)
    )


def of_key(table: str, key: str) -> Row:
    return (table, key, {"id": key}, None, "insert")


@given(st.lists(st.text(min_size=1, max_size=20), max_size=40), st.integers(0, 5))
def test_a_text_has_the_same_number_in_every_column(texts: list[str], start: int) -> None:
    whole = text_hashes(pa.array(texts, pa.string()))
    assert whole.tolist() == [text_hashes(pa.array([text]))[0] for text in texts]
    cut = text_hashes(pa.array(texts, pa.string()).slice(start))
    assert cut.tolist() == whole[start:].tolist()
    assert len(set(whole.tolist())) == len(set(texts))


def test_equal_keys_of_two_tables_are_two_groups() -> None:
    ids = group_ids(rows(of_key("a", "1"), of_key("b", "1"), of_key("a", "1"))).to_pylist()
    assert ids[0] == ids[2] != ids[1]


def test_the_low_and_the_high_bits_are_spread_evenly() -> None:
    keys = pa.array([f'public\norders\n["{n}"]' for n in range(20_000)])
    hashes = text_hashes(keys)
    for shift in (0, 30, 60):
        counts = np.bincount((hashes >> np.uint64(shift) & np.uint64(15)).astype(int))
        assert counts.min() > 1_000
        assert counts.max() < 1_500


def test_without_grouping_no_message_has_a_group_or_a_place_in_its_table() -> None:
    found = groups_of(rows(("a", "1", {}, None, "truncate")), Grouping(by_group=False))
    assert found.ids.to_pylist() == [None]
    assert found.whole_table.to_pylist() == [False]


def test_a_truncate_and_a_schema_change_have_their_place_among_all_of_their_table() -> None:
    actions = ("insert", "truncate", "schema_change", "delete", "message", "gap")
    some: list[Row] = [("a", "1", {"id": 1}, None, action) for action in actions]
    found = groups_of(rows(*some))
    assert found.whole_table.to_pylist() == [False, True, True, False, False, False]


BY_ACCOUNT = Grouping(columns={"public.orders": ("account", "region")})


def test_configured_columns_make_the_group_in_their_table_alone() -> None:
    ids = group_ids(
        rows(
            ("orders", "1", {"id": 1, "account": 7, "region": "eu"}, None, "insert"),
            ("orders", "2", {"region": "eu", "account": 7, "id": 2}, None, "insert"),
            ("orders", "3", {"id": 3, "account": "7", "region": "eu"}, None, "insert"),
            ("users", "1", {"id": 1, "account": 7, "region": "eu"}, None, "insert"),
            ("users", "2", {"id": 2, "account": 7, "region": "eu"}, None, "insert"),
        ),
        BY_ACCOUNT,
    ).to_pylist()
    assert ids[0] == ids[1]
    assert len({*ids}) == 4


def test_a_row_of_another_table_has_the_group_it_has_without_configured_columns() -> None:
    some = rows(of_key("users", "1"), of_key("items", "2"))
    assert group_ids(some, BY_ACCOUNT) == group_ids(some, BY_KEY)


def test_a_row_whose_group_is_unknown_or_was_another_has_its_place_in_the_whole_table() -> None:
    found = groups_of(
        rows(
            ("orders", "1", {"id": 1}, None, "delete"),
            ("orders", "1", {"account": 2, "region": "eu"}, {"account": 1}, "update"),
            ("orders", "1", {"id": 1, "account": 2, "region": "eu"}, {"price": 1}, "update"),
            ("orders", "1", {"account": None, "region": "eu"}, None, "insert"),
        ),
        BY_ACCOUNT,
    )
    assert found.whole_table.to_pylist() == [True, True, False, False]


def test_no_rows_have_no_groups() -> None:
    assert len(group_ids(rows())) == 0
    assert len(group_ids(rows(), BY_ACCOUNT)) == 0


def test_an_update_that_changes_its_key_has_its_place_in_the_whole_table() -> None:
    some = rows(
        ("orders", "2", {"id": 2, "n": 2}, {"id": 1}, "update"),
        # The new value of another column reads as the key does.
        ("orders", "2", {"id": 2, "n": 2}, {"n": 6}, "update"),
        # The key stands in the record in another form.
        ("flags", "t", {"flag": True, "n": 1}, {"n": 2}, "update"),
    )
    some = some.set_column(
        some.schema.get_field_index("old_record_pks"),
        "old_record_pks",
        pa.array(['["1"]', None, None], pa.string()),
    )
    assert groups_of(some).whole_table.to_pylist() == [True, False, False]
