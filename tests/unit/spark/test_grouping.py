"""A group's changes stay together, whatever stands beside them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from spark_pipeline.grouping import group_hashes, in_part

_keys = st.tuples(st.sampled_from(["a", "b"]), st.text(max_size=8), st.text(max_size=40))


def _changes(keys: list[tuple[str, str, str]]) -> pa.RecordBatch:
    columns = ("table_schema", "table_name", "record_pks", "action")
    return pa.RecordBatch.from_arrays(
        [
            *[pa.array([key[at] for key in keys], pa.string()) for at in range(3)],
            pa.array(["insert"] * len(keys), pa.string()),
        ],
        names=columns,
    )


@given(st.lists(_keys, max_size=30), st.integers(0, 5), st.integers(1, 7))
def test_a_group_has_the_same_part_in_every_batch(
    keys: list[tuple[str, str, str]], start: int, parts: int
) -> None:
    whole = group_hashes(_changes(keys))
    alone = [group_hashes(_changes([key]))[0] for key in keys]
    assert whole.tolist() == alone
    cut = _changes(keys).slice(start)
    taken = np.zeros(cut.num_rows, int)
    for part in range(parts):
        taken += in_part(cut, part, parts).to_numpy(zero_copy_only=False)
    assert (taken == 1).all()


def test_groups_are_spread_evenly() -> None:
    hashes = group_hashes(_changes([("public", "orders", f'["{i}"]') for i in range(10_000)]))
    counts = np.bincount((hashes % np.uint64(4)).astype(int), minlength=4)
    assert counts.min() > 2_000
