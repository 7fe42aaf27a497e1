"""The package ``walbrook``: what other programs may rely on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import walbrook

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", walbrook.__all__)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(walbrook, name) is not None
    pages = (DOCS / "python.md").read_text() + (DOCS / "event-time.md").read_text()
    assert re.search(rf"`(walbrook\.)?{name}\b", pages), f"docs/python.md does not name {name}"


def test_the_public_names_are_these() -> None:
    assert set(walbrook.__all__) == {
        *("decode", "Decoder", "Decoded", "ValueFormat", "catalog_of", "WalbrookDataSource"),
        *("EventTimeType", "register_event_time_type", "Sink", "MessageBatch", "Delivery"),
        *("Cursor", "WalbrookError", "TransientError", "OperatorError", "ConfigError"),
        *("SourceError", "GapError", "PoisonError", "DecodeError", "CorruptionError"),
        *("ProtocolError", "__version__"),
    }


def test_the_package_is_imported_without_spark_and_arrow() -> None:
    program = "import sys, walbrook; print([m for m in ('pyspark', 'pyarrow') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]", loaded.stderr


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = walbrook.nothing


def test_program_and_spark_find_the_packages_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "walbrook").mkdir()  # as beside a clone
    program = (
        "import pkgutil, walbrook; print(walbrook.decode is not None, "
        "'pyspark_walbrook' in {module.name for module in pkgutil.iter_modules()})"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert said.stdout.strip() == "True True", said.stderr
