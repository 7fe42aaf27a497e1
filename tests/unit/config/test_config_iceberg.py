"""The iceberg destination: its catalog, and which settings go together."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import cdc.config.extras
from cdc.config import IcebergDestination, SinkConfig, show
from cdc.config.extras import check_extras
from cdc.errors import ConfigError
from tests.unit.config.config_texts import read, refusal, sink

TO = "type: iceberg, url: 's3://lake/shop'"


def one(body: str) -> SinkConfig:
    return read(sink(body)).sinks[0]


def destination(of: str) -> IcebergDestination:
    found = one(f"destination: {{{of}}}").destination
    assert isinstance(found, IcebergDestination)
    return found


def test_a_history_with_a_catalog_in_the_state_database_is_the_default() -> None:
    a = one(f"destination: {{{TO}}}")
    assert a.actions == ("insert", "update", "delete", "truncate", "schema_change")
    assert a.rewind_ways == ("new_generation",)
    to = destination(TO)
    assert (to.mode, to.merge, to.partition_by) == ("append", "on_read", "date")
    assert to.catalog.properties() == {"type": "sql"}


def test_properties_of_a_catalog_are_secrets() -> None:
    catalog = "{type: rest, uri: 'https://c/', options: {token: s3cret, warehouse: w}}"
    body = f"destination: {{{TO}, catalog: {catalog}}}"
    to = one(body).destination
    assert isinstance(to, IcebergDestination)
    assert to.catalog.properties() == {
        "type": "rest", "uri": "https://c/", "token": "s3cret", "warehouse": "w",
    }  # fmt: skip
    assert "s3cret" not in show(read(sink(body)))
    assert "s3cret" not in repr(to)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("destination: {type: iceberg}", "needs path or url"),
        ("destination: {type: iceberg, url: 'az://lake/x'}", "url: should be abfss://container@"),
        (f"destination: {{{TO}, merge: copy_on_write}}", "merge: has a meaning with mode: upsert"),
        (f"destination: {{{TO}, catalog: {{type: rest}}}}", "catalog.uri: is needed with type: re"),
        (
            f"destination: {{{TO}, mode: upsert}}\nrouting: \"'t'\"",
            "mode: upsert has a table per",
        ),
        (f"destination: {{{TO}, mode: upsert}}\nactions: [insert]", "needs truncate with mode"),
        (f"destination: {{{TO}}}\nshape: debezium", "writes columns, not messages"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(body: str, says: str) -> None:
    assert says in refusal(sink(body))


@pytest.mark.parametrize(
    ("kind", "module", "fix"),
    [("glue", "boto3", "pip install boto3"), ("hive", "thrift", "pip install 'pyiceberg[hive]'")],
)
def test_a_missing_package_of_a_catalog_is_named(
    kind: str, module: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cdc.config.extras, "find_spec", lambda name: None if name == module else find_spec("json")
    )
    catalog = f"{{type: {kind}, uri: 'thrift://h'}}"
    with pytest.raises(ConfigError) as refused:
        check_extras(read(sink(f"destination: {{{TO}, catalog: {catalog}}}")).sinks)
    assert refused.value.fix == fix


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cdc.config.extras,
        "find_spec",
        lambda name: None if name == "pyiceberg" else find_spec(name),
    )
    with pytest.raises(ConfigError) as refused:
        check_extras(read(sink(f"destination: {{{TO}}}")).sinks)
    assert "pip install 'walbrook[lakehouse]'" in refused.value.fix
