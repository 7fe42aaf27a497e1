"""Deliveries that wait for their destinations leave the cores to the others."""

from __future__ import annotations

import os

import pytest

from spark_pipeline.task_room import with_room


@pytest.mark.parametrize(
    ("master", "room", "cores"),
    [
        ("local", "local[17]", 1),
        ("local[2]", "local[18]", 2),
        ("local[2, 4]", "local[18, 4]", 2),
        ("local[*]", f"local[{len(os.sched_getaffinity(0)) + 16}]", len(os.sched_getaffinity(0))),
    ],
)
def test_work_is_cut_for_the_cores_and_there_is_room_beside_them(
    master: str, room: str, cores: int
) -> None:
    assert with_room(master, 16) == (room, {"spark.default.parallelism": str(cores)})


@pytest.mark.parametrize("master", ["yarn", "spark://127.0.0.1:7077", "local-cluster[2,1,512]"])
def test_a_cluster_is_left_as_it_is(master: str) -> None:
    assert with_room(master, 16) == (master, {})
