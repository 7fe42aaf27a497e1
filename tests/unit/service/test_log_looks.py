"""``walbrook log`` while something is missing, failing or changing under it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import OperatorError
from cdc.log import segment
from cdc.log.recovery.verify import LogVerification
from cdc.log.tier import segment_reader
from cdc.log.tier.tier import TierSettings
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.service.cli import log_listing
from cdc.service.cli.log import log_app
from tests.unit.log.batches import KEEP_ALL, KEEP_NONE, append, sealed_log
from tests.waiting import until


@pytest.mark.parametrize("command", ["ls", "cat"])
def test_segments_without_a_manifest_are_complained_of(tmp_path: Path, command: str) -> None:
    base: dict[str, object] = {"name": "shop", "url": "postgres://nobody@127.0.0.1:1/none"}
    base |= {"slot": {"name": "s"}, "publication": {"name": "p"}}
    config = tmp_path / "walbrook.yaml"
    config.write_text(yaml.safe_dump({"databases": [base], "log": {"directory": "log"}}))
    directory = tmp_path / "log" / "shop"
    sealed_log(directory).close()
    (directory / "manifest.json").unlink()
    result = CliRunner().invoke(log_app, [command, "--config", str(config)])
    assert isinstance(result.exception, OperatorError)
    assert "has no manifest" in str(result.exception)


def test_a_segment_sealed_and_trimmed_between_two_looks_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path, limits=SegmentLimits(bytes=1))
    append(log, 10)
    real = segment.index_length

    def then_trimmed(path: Path) -> int:
        found = real(path)
        if log.next_batch == 1:
            append(log, 20)
            log.retain(Cursor(20, 0), KEEP_NONE)
        return found

    monkeypatch.setattr(log_listing, "index_length", then_trimmed)
    listing = log_listing.describe_log("shop", tmp_path)
    assert (listing["end"], listing["next_batch"]) == (str(Cursor(20, 3)), 2)
    log.close()


def test_a_tier_that_fails_once_does_not_end_a_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = sealed_log(tmp_path / "shop", tier=TierSettings(str(tmp_path / "cold"), hot_bytes=0))

    def all_moved() -> bool:
        log.retain(ORIGIN, KEEP_ALL)
        return all(one.place for one in log.manifest.segments)

    until("all segments moved", all_moved)
    reads: list[int] = []
    real = segment_reader._Ranged.read

    def fail_once(self: segment_reader._Ranged, offset: int, size: int) -> pa.Buffer:
        reads.append(offset)
        if len(reads) == 5:
            raise OSError("the tier went away")
        return real(self, offset, size)

    monkeypatch.setattr(segment_reader._Ranged, "read", fail_once)
    verification = LogVerification(tmp_path / "shop")
    (damage,) = verification.run()
    assert "cannot be read further: the tier went away" in str(damage)
    assert verification.segments == len(log.manifest.segments) + 1
    log.close()
