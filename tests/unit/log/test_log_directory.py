"""A log directory that cannot be used: a person has to change something, and is told what."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.errors import OperatorError, exit_status
from cdc.log.writer import LogWriter


@pytest.mark.parametrize("place", ["file/log", "file", f"{'x' * 300}/log"])
def test_a_directory_that_cannot_be_made_is_for_the_operator(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OperatorError) as caught:
        LogWriter(tmp_path / place)
    assert caught.value.kind == "log_directory"
    assert str(tmp_path / place) in caught.value.what
    assert "log.directory" in caught.value.fix
    assert exit_status(caught.value) == 78, "the supervisor does not start it again"
