"""The copy of a configuration that the processes of a service read."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cdc.config import load
from cdc.service.live_config.file import ConfigCopy, ConfigFile
from cdc.service.live_config.plan import changed_since

FILE = """
databases:
  - {name: shop, url: "postgres://u:canary@h/d", slot: {name: s}, publication: {name: p}}
sinks:
  - {name: lines, destination: {type: file, path: lines}}
log: {directory: log}
"""


def written(directory: Path, text: str = FILE) -> ConfigFile:
    path = directory / "walbrook.yaml"
    path.write_text(text)
    return ConfigFile.read(path)


def test_a_copy_is_the_same_configuration_wherever_it_lies(tmp_path: Path) -> None:
    file = written(tmp_path)
    copy = ConfigCopy(file)
    (tmp_path / "walbrook.yaml").write_text("nothing: right")
    assert load(copy.path, base=copy.base) == file.config


def test_a_copy_is_for_the_account_of_the_service_alone(tmp_path: Path) -> None:
    copy = ConfigCopy(written(tmp_path))
    copy.prepare(written(tmp_path, FILE + "spark: {driver_memory: 2g}\n"))
    assert load(copy.path, base=copy.base).spark.driver_memory != "2g"
    copy.replace()
    assert stat.S_IMODE(copy.path.stat().st_mode) == 0o600
    assert load(copy.path, base=copy.base).spark.driver_memory == "2g"
    copy.prepare(written(tmp_path))
    copy.remove()
    assert list((tmp_path / "log").iterdir()) == []


def test_the_document_of_a_file_has_no_secret(tmp_path: Path) -> None:
    assert "canary" not in written(tmp_path).document()


def test_a_service_that_waited_begins_with_the_file_as_it_is_then(tmp_path: Path) -> None:
    read = written(tmp_path)
    assert changed_since(read).config == read.config
    more = FILE.replace("sinks:", "sinks:\n  - {name: b, destination: {type: file, path: b}}")
    written(tmp_path, more + "spark: {driver_memory: 2g}\n")
    now = changed_since(read)
    assert [sink.name for sink in now.config.sinks] == ["b", "lines"]
    assert now.config.spark == read.config.spark, "only a restart changes that"


@pytest.mark.parametrize("text", ["nothing: right", FILE.replace("h/d", "elsewhere/d")])
def test_a_service_that_waited_begins_with_what_it_has_read_if_the_file_cannot_take_over(
    tmp_path: Path, text: str
) -> None:
    read = written(tmp_path)
    (tmp_path / "walbrook.yaml").write_text(text)
    assert changed_since(read) == read
    (tmp_path / "walbrook.yaml").unlink()
    assert changed_since(read) == read
