"""The delta destination: where its tables lie, and which settings go together."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import cdc.config.extras
from cdc.config import DeltaDestination, SinkConfig, show
from cdc.config.extras import check_extras
from cdc.errors import ConfigError
from tests.unit.config.config_texts import read, refusal, sink

TO = "type: delta, url: 's3://lake/shop'"


def one(body: str) -> SinkConfig:
    return read(sink(body)).sinks[0]


def destination(of: str) -> DeltaDestination:
    found = one(f"destination: {{{of}}}").destination
    assert isinstance(found, DeltaDestination)
    return found


def test_a_history_is_the_default_and_takes_every_change_of_tables() -> None:
    a = one(f"destination: {{{TO}}}")
    assert a.actions == ("insert", "update", "delete", "truncate", "schema_change")
    assert a.rewind_ways == ("new_generation",)
    to = destination(TO)
    assert (to.mode, to.partition_by, to.table) == ("append", "date", "{schema}.{table}")
    assert (to.min_rows, to.max_delay_ms, to.maintenance.enabled) == (100_000, 10_000, True)


def test_its_place_is_a_folder_or_a_url() -> None:
    assert destination(TO).root == "s3://lake/shop"
    assert Path(destination("type: delta, path: /data/lake").root) == Path("/data/lake")
    for url in ("gs://lake/shop", "abfs://lake/shop", "abfss://lake@acc.dfs.core.windows.net/shop"):
        assert destination(f"type: delta, url: '{url}'").root == url


def test_options_of_the_store_are_secrets() -> None:
    body = f"destination: {{{TO}, storage_options: {{AWS_SECRET_ACCESS_KEY: s3cret}}}}"
    to = one(body).destination
    assert isinstance(to, DeltaDestination)
    assert to.options() == {"AWS_SECRET_ACCESS_KEY": "s3cret"}
    assert "s3cret" not in show(read(sink(body)))
    assert "s3cret" not in repr(to)


def test_two_sinks_never_share_a_place() -> None:
    both = sink(f"destination: {{{TO}}}") + f"- {{name: b, destination: {{{TO}}}}}\n"
    assert "sinks[1]" in refusal(both)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("destination: {type: delta}", "needs path or url"),
        (f"destination: {{{TO}, path: here}}", "cannot both be given"),
        ("destination: {type: delta, url: 'https://lake'}", "should be a URL such as s3://"),
        ("destination: {type: delta, url: 's3://lake?x=1'}", "should be a URL such as s3://"),
        ("destination: {type: delta, url: 's3://key:s@lake/x'}", "credentials and other options"),
        ("destination: {type: delta, url: 'abfss://a:s@lake/x'}", "credentials and other options"),
        ("destination: {type: delta, path: a, storage_options: {A: b}}", "has no use with path"),
        (f"destination: {{{TO}, table: all}}", "should hold {table}"),
        (f"destination: {{{TO}, mode: upsert, partition_by: date}}", "mode: append alone"),
        (f"destination: {{{TO}, mode: upsert}}\nactions: [insert]", "needs truncate"),
        (f"destination: {{{TO}, mode: upsert}}\nrouting: record.id", "mode: upsert has a table"),
        (f"destination: {{{TO}}}\ntransform: record", "delta writes columns, not messages"),
        (f"destination: {{{TO}}}\nshape: record", "delta writes columns, not messages"),
        (f"destination: {{{TO}}}\nactions: [message]", "message belongs to no table"),
        (f"destination: {{{TO}}}\npartition_count: 2", "above 1 is impossible with delta"),
        (
            f"destination: {{{TO}}}\nactions: [insert]\nordering: processing_time",
            "not possible with delta",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(body: str, says: str) -> None:
    assert says in refusal(sink(body))


def test_a_missing_package_is_reported_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(name: str) -> object:
        return None if name == "deltalake" else find_spec(name)

    monkeypatch.setattr(cdc.config.extras, "find_spec", without)
    with pytest.raises(ConfigError, match=r"deltalake.*pip install 'walbrook\[lakehouse\]'"):
        check_extras([one(f"destination: {{{TO}}}")])
