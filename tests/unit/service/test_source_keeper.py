"""A source that is prepared while the configuration changes; no database is asked."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cdc.config import Config, Database, loads
from cdc.service.process import source_keeper
from cdc.service.process.source_keeper import SourceKeeper
from tests.waiting import until

_CONFIG = """
databases:
  - {name: shop, url: "postgres://u@127.0.0.1:1/d", slot: {name: s}, publication: {name: p}}
sinks:
  - {name: NAME, destination: {type: file, path: lines}}
"""


def test_sinks_of_a_configuration_that_comes_while_a_source_is_prepared_are_registered_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (loads(_CONFIG.replace("NAME", name), tmp_path) for name in ("a", "b"))
    registered: list[str] = []
    begins, goes_on = threading.Event(), threading.Event()

    def prepared(config: Config, database: Database) -> int:
        begins.set()
        assert goes_on.wait(10)
        registered.extend(sink.name for sink in config.sinks_of(database.name))
        return len(registered)

    monkeypatch.setattr(source_keeper, "prepare_database", prepared)
    keeper = SourceKeeper(before, before.database("shop"))
    try:
        assert begins.wait(10)
        keeper.follow(after)
        goes_on.set()
        until("a term", lambda: keeper.term is not None)
        assert (registered, keeper.term) == (["a", "b"], 2)
    finally:
        keeper.close()
