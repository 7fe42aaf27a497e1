"""What is said of a place that was tried once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.errors import OperatorError, TransientError
from cdc.probing import probe_all
from sinks.directory import probe_directory


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("it is retried", "it is down"),
        ("it is retried; check that it is up", "it is down. To fix it: check that it is up"),
        ("check that it is up", "it is down. To fix it: check that it is up"),
    ],
)
def test_a_fix_is_what_a_person_can_do(fix: str, said: str) -> None:
    def look() -> str:
        raise TransientError("it is down", fix=fix)

    (found,) = probe_all({"place": look}, 10)
    assert (found.ok, found.text) == (False, said)


def test_a_directory_of_the_kernel_is_no_place_for_files(tmp_path: Path) -> None:
    assert probe_directory(tmp_path / "new" / "one") == f"may be created in {tmp_path}"
    assert probe_directory(tmp_path) == "may be written to"
    for path in ("/proc/x", "/proc", "/sys/x/y"):
        with pytest.raises(
            OperatorError, match=r"belongs to the kernel|Permission denied|Read-only"
        ):
            probe_directory(Path(path))
