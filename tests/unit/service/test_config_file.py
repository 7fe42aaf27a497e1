"""The copy of a configuration that the processes of a service read."""

from __future__ import annotations

import stat
from pathlib import Path

from cdc.config import load
from cdc.service.live_config.file import ConfigCopy, ConfigFile

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
