"""Rows of a table cut into its partitions, as folders of the hive style name them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa


def partitions(
    rows: pa.Table, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, str | None], pa.Table]]:
    """The rows of each partition, in their order, without the columns that its folder says."""
    if not names:
        yield "", {}, rows
        return
    codes = np.zeros(rows.num_rows, np.int64)
    for name in names:
        encoded = rows.column(name).combine_chunks().dictionary_encode()
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
    rest = rows.drop_columns(list(names))
    found, firsts = np.unique(codes, return_index=True)
    for code, first in zip(found.tolist(), firsts.tolist(), strict=True):
        values = {name: str(rows.column(name)[first].as_py()) for name in names}
        folder = "".join(f"{name}={value}/" for name, value in values.items())
        part = rest if len(found) == 1 else rest.take(np.flatnonzero(codes == code))
        yield folder, dict(values), part
