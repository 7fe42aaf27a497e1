"""The archive of Spark's classes is used where it is, and what cannot be used does no harm."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.service.process.java import find_java
from spark_pipeline.session.session import class_archive_option

ROOT = Path(__file__).parents[3]
WRITE = """
import sys
from pathlib import Path
from spark_pipeline.session.class_archive import write_class_archive
write_class_archive(Path(sys.argv[1]))
"""
START = """
import sys
from cdc.config import Spark
from spark_pipeline.session.session import open_session
session = open_session(Spark(driver_java_options=sys.argv[1]))
assert session.range(3).count() == 3
"""


def java(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [find_java() / "bin" / "java", *arguments], capture_output=True, text=True, check=False
    )


def python(program: str, argument: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, argument], env=environment, check=True)


def test_without_a_file_the_jvm_gets_no_option(tmp_path: Path) -> None:
    assert class_archive_option(tmp_path / "none.jsa") == ""


def test_a_file_that_is_no_archive_of_this_java_does_no_harm(tmp_path: Path) -> None:
    archive = tmp_path / "of another java.jsa"
    archive.write_bytes(b"\xf0" * 100_000)
    (option,) = shlex.split(class_archive_option(archive))
    assert option.endswith(str(archive))
    answer = java(option, "-version")
    assert answer.returncode == 0, answer


@pytest.mark.chaos
def test_a_session_takes_its_classes_from_the_archive(tmp_path: Path) -> None:
    """Slow by its nature: an archive is written in half a minute."""
    archive, loaded = tmp_path / "classes.jsa", tmp_path / "loaded"
    python(WRITE, str(archive))
    python(START, f"{class_archive_option(archive)} -Xlog:class+load:file={loaded}")
    ours = [line for line in loaded.read_text().splitlines() if " org.apache.spark" in line]
    shared = [line for line in ours if "shared objects file" in line]
    assert len(shared) > len(ours) / 2 > 500
