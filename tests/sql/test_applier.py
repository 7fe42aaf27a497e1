"""Requests to apply a configuration, without the processes of a service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc.errors import OperatorError
from cdc.service.live_config import applier as applier_module
from cdc.service.live_config.applier import ConfigApplier
from cdc.service.live_config.file import ConfigCopy, ConfigFile
from cdc.service.process.ownership import Ownership
from cdc.service.process.supervisor import Supervisor
from cdc.state.configurations import request_own, store_configuration
from tests.fix_postgres import Database
from tests.waiting import until
from tests.walbrook_service import _url

pytestmark = pytest.mark.migrated

_FILE = """
databases:
  - {{name: shop, url: {url}, slot: {{name: s}}, publication: {{name: p}}}}
sinks:
  - {{name: files, destination: {{type: file, path: files}}}}
log: {{directory: log}}
spark: {{checkpoint_directory: spark}}
"""
_MORE = "  - {{name: {name}, destination: {{type: file, path: {name}}}}}\nlog:"
_ASKED = "SELECT asked_by, state FROM walbrook.config_requests ORDER BY id"


class Applying:
    """An applier of a file, and what its processes read."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.path, self.signalled = directory / "walbrook.yaml", threading.Event()
        self.path.write_text(_FILE.format(url=_url(database.dsn)))
        running = ConfigFile.read(self.path)
        with database.connect() as state:
            revision = store_configuration(state, ["shop"], "f", running.document(), "start")
        self.copy, self.before = ConfigCopy(running), running.text
        self.applier = ConfigApplier(
            running,
            revision,
            self.copy,
            Supervisor(running.config, self.copy.path, {}),
            {},
            Ownership(running.config),
            self.signalled,
        )

    def add(self, name: str) -> None:
        """One more sink in the file."""
        self.path.write_text(self.path.read_text().replace("log:", _MORE.format(name=name)))


@pytest.fixture
def applying(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Applying]:
    monkeypatch.setattr(applier_module, "_AWAY_S", 0.05)
    made = Applying(database, tmp_path)
    yield made
    made.applier.close()


def test_a_signal_is_answered_though_the_state_database_was_away_when_it_came(
    applying: Applying, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([psycopg.OperationalError("away")])

    def asked(*given: Any) -> None:
        for failure in failures:
            raise failure
        request_own(*given)

    monkeypatch.setattr(applier_module, "request_own", asked)
    applying.signalled.set()
    until("the answer", lambda: database.execute(_ASKED) == [("SIGHUP", "done")])
    assert not applying.signalled.is_set()


def test_processes_do_not_read_a_configuration_that_is_refused_in_the_end(
    applying: Applying, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def register(*_given: object) -> None:
        read.append(applying.copy.path.read_text())
        raise OperatorError("no", fix="none")

    monkeypatch.setattr(ConfigApplier, "_register", register)
    monkeypatch.setattr(ConfigApplier, "_published", lambda *_given: nullcontext({}))
    applying.add("more")
    applying.signalled.set()
    until("the answer", lambda: database.execute(_ASKED) == [("SIGHUP", "refused")])
    assert read == [applying.before]
    assert applying.copy.path.read_text() == applying.before
    assert [each.name for each in applying.applier.config.sinks] == ["files"]
    assert len(list(applying.copy.path.parent.glob(".shop.*"))) == 1, "no draft is left"
