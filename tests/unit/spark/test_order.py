"""Slicing, reordering and matching: the pure parts of the Spark stage."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.change import CHANGE_SCHEMA
from cdc.cursor import Cursor
from cdc.errors import ProtocolError
from spark_pipeline.delivery.matching import Match
from spark_pipeline.feed.reorder import Reorder
from spark_pipeline.slices.exchange import (
    Exchange,
    PlannedRange,
    SliceMarker,
    leave,
    markers_from_arrow,
    markers_to_arrow,
    note_planned,
    pick_up,
    sweep_shared_memory,
)
from spark_pipeline.source.slicing import cut


def marker(batch: int, part: int = 0, parts: int = 1, start: int = 0, end: int = 2) -> SliceMarker:
    return SliceMarker(start, end, batch, part, parts, 1, Cursor(batch, 1), 9, "f", 0, part)


@given(rows=st.lists(st.integers(0, 50), min_size=1, max_size=20), partitions=st.integers(1, 5))
def test_slices_cover_every_row_once_in_order(rows: Sequence[int], partitions: int) -> None:
    planned = cut(7, rows, partitions)
    assert len(planned) <= partitions
    flat = [piece for slices in planned for piece in slices]
    assert [(piece.batch_idx, row) for piece in flat for row in range(piece.start, piece.stop)] == [
        (7 + batch, row) for batch, count in enumerate(rows) for row in range(count)
    ]
    for batch, _ in enumerate(rows, start=7):
        own = [piece for piece in flat if piece.batch_idx == batch]
        assert [piece.part for piece in own] == list(range(own[0].parts))
        assert len(own) == own[0].parts


@given(rows=st.lists(st.integers(0, 30), min_size=1, max_size=10), seed=st.integers())
def test_shuffled_markers_come_back_in_order(rows: Sequence[int], seed: int) -> None:
    flat = [piece for slices in cut(0, rows, 4) for piece in slices]
    markers = [marker(p.batch_idx, p.part, p.parts, 0, len(rows)) for p in flat]
    shuffled = random.Random(seed).sample(markers, len(markers))
    assert Reorder(0).micro_batch(shuffled) == markers


def test_a_batch_waits_for_the_one_before_it_and_for_all_its_parts() -> None:
    reorder = Reorder(0)
    reorder.accept(marker(1))
    reorder.accept(marker(0, 1, 2))
    assert reorder.ready() == []
    reorder.accept(marker(0, 0, 2))
    assert [(m.batch_idx, m.part) for m in reorder.ready()] == [(0, 0), (0, 1), (1, 0)]


def test_a_double_marker_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="came twice"):
        Reorder(0).micro_batch([marker(0), marker(0)])


def test_a_marker_of_a_batch_already_handed_on_is_an_error() -> None:
    reorder = Reorder(0)
    reorder.micro_batch([marker(0), marker(1)])
    with pytest.raises(ProtocolError, match="came twice"):
        reorder.accept(marker(1))


@pytest.mark.parametrize(
    ("markers", "says"),
    [
        ([], "0 ranges"),
        ([marker(0)], "did not get the markers"),
        ([marker(1)], "did not get the markers"),
        ([marker(0), marker(1, 1, 2)], "did not get the markers"),
        ([marker(0), marker(1, end=3)], "2 ranges"),
        ([marker(1, start=1)], "starts at batch 1"),
        ([marker(0, 0, 2), marker(0, 1, 3), marker(1)], "disagree"),
        ([marker(0, 2, 2), marker(1)], "disagree"),
    ],
)
def test_a_micro_batch_that_does_not_add_up_is_refused(
    markers: list[SliceMarker], says: str
) -> None:
    with pytest.raises(ProtocolError, match=says):
        Reorder(0).micro_batch(markers)


def test_markers_survive_the_way_through_spark() -> None:
    markers = [marker(0, 0, 2), marker(0, 1, 2), marker(1)]
    table = pa.Table.from_batches([markers_to_arrow(markers)])
    assert markers_from_arrow(table) == markers


def test_slices_left_in_the_exchange_are_picked_up_in_order_and_neighbours_as_one(
    tmp_path: Path,
) -> None:
    first, second = changes(*ALL), changes(*ALL[:2])
    path = str(leave(tmp_path, iter([first, second]), CHANGE_SCHEMA))

    def at(position: int, offset: int, rows: int) -> SliceMarker:
        return SliceMarker(0, 1, 0, 0, 1, rows, Cursor(1, 1), 9, path, position, offset)

    picked = list(pick_up([at(0, 0, 2), at(0, 2, 3), at(1, 0, 2), at(0, 5, 1)]))
    assert [batch.num_rows for batch in picked] == [5, 2, 1]
    assert picked == [first.slice(0, 5), second, first.slice(5, 1)]


def test_an_exchange_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    killed = Exchange.create(tmp_path / "scratch")
    leave(killed.directory, iter([changes(*ALL)]), CHANGE_SCHEMA)
    exchange = Exchange.create(tmp_path / "scratch")
    assert not killed.directory.exists()
    note_planned(exchange.directory, PlannedRange(3, 5, 7))
    assert exchange.planned() == PlannedRange(3, 5, 7)
    exchange.clear()
    assert list(exchange.directory.iterdir()) == []
    exchange.remove()
    assert not exchange.directory.exists()


_LEFT_BEHIND = """
import os, sys
from pathlib import Path
from spark_pipeline.slices import exchange
exchange._SHARED_MEMORY, exchange._SHARED_MEMORY_FREE_MIN = Path(sys.argv[1]), 0
exchange.Exchange.create(Path(sys.argv[2]))
print("made", flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_a_killed_process_is_freed_and_that_of_a_living_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr("spark_pipeline.slices.exchange._SHARED_MEMORY", memory)
    monkeypatch.setattr("spark_pipeline.slices.exchange._SHARED_MEMORY_FREE_MIN", 0)
    ours = Exchange.create(tmp_path / "ours")
    processes = []
    for name in ("killed", "alive"):
        command = [sys.executable, "-c", _LEFT_BEHIND, str(memory), str(tmp_path / name)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        processes.append(process)
    killed, alive = processes
    killed.kill()
    killed.communicate()
    assert len(list(memory.iterdir())) == 3
    sweep_shared_memory()
    assert len(list(memory.iterdir())) == 2
    assert ours.directory.exists()
    alive.communicate()
    sweep_shared_memory()
    assert list(memory.iterdir()) == [ours.directory.parent]
    ours.remove()
    assert list(memory.iterdir()) == []


def test_decoded_rows_are_private_and_a_squatted_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr("spark_pipeline.slices.exchange._SHARED_MEMORY", memory)
    monkeypatch.setattr("spark_pipeline.slices.exchange._SHARED_MEMORY_FREE_MIN", 0)
    scratch = tmp_path / "scratch"
    exchange = Exchange.create(scratch)
    (place,) = memory.iterdir()
    assert exchange.directory.parent == place
    assert place.stat().st_mode & 0o077 == 0
    place.chmod(0o755)
    assert Exchange.create(scratch).directory.parent == scratch
    shutil.rmtree(place)
    place.touch()
    assert Exchange.create(scratch).directory.parent == scratch


def changes(*rows: tuple[str, str, str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "commit_lsn": 1,
                "commit_idx": idx,
                "commit_timestamp": 0,
                "xid": 1,
                "table_schema": schema,
                "table_name": table,
                "action": action,
                "record": "{}",
                "record_pks": "[]",
            }
            for idx, (schema, table, action) in enumerate(rows)
        ],
        schema=CHANGE_SCHEMA,
    )


ALL = [
    ("public", "a", "insert"),
    ("public", "b", "update"),
    ("audit", "a", "insert"),
    ("public", "a", "delete"),
    ("", "", "message"),
    ("public", "a", "truncate"),
]


@pytest.mark.parametrize(
    ("match", "taken"),
    [
        (Match(("insert", "update", "delete")), [0, 1, 2, 3]),
        (Match(("insert",)), [0, 2]),
        (Match(("insert", "delete"), include_tables=frozenset({"public.a"})), [0, 3]),
        (Match(("insert", "update"), exclude_tables=frozenset({"public.a"})), [1, 2]),
        (Match(("insert", "update"), include_schemas=frozenset({"audit"})), [2]),
        (Match(("insert", "update"), exclude_schemas=frozenset({"audit"})), [0, 1]),
        (Match(("message",), include_tables=frozenset({"public.a"})), [4]),
        (Match(("truncate", "delete")), [3, 5]),
        (Match(("insert",), include_tables=frozenset({"public.none"})), []),
    ],
)
def test_a_consumer_takes_its_tables_and_actions_in_order(match: Match, taken: list[int]) -> None:
    assert match.select(changes(*ALL)).column("commit_idx").to_pylist() == taken
