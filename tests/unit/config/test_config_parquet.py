"""The parquet destination: typed tables or JSON, on a disk or in a store."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import cdc.config.extras
from cdc.config import ParquetDestination, SinkConfig, show
from cdc.config.extras import check_extras
from cdc.errors import ConfigError
from tests.unit.config.config_texts import read, refusal, sink

TO = "type: parquet, url: 's3://lake/shop'"
JSON = "type: parquet, columns: json, path: lake"


def one(body: str) -> SinkConfig:
    return read(sink(body)).sinks[0]


def destination(of: str) -> ParquetDestination:
    found = one(f"destination: {{{of}}}").destination
    assert isinstance(found, ParquetDestination)
    return found


def test_columns_are_typed_and_every_change_of_tables_is_taken_unless_it_is_json() -> None:
    typed, json = one(f"destination: {{{TO}}}"), one(f"destination: {{{JSON}}}")
    assert typed.actions == ("insert", "update", "delete", "truncate", "schema_change")
    assert json.actions == ("insert", "update", "delete")
    assert typed.rewind_ways == json.rewind_ways == ("new_generation", "truncate")
    assert (typed.destination.takes_texts, json.destination.takes_texts) == (True, False)
    assert typed.destination.delivery_rows > json.destination.delivery_rows


def test_its_place_is_a_folder_or_a_url_and_its_levels_follow_the_table() -> None:
    assert destination(TO).root == "s3://lake/shop"
    assert Path(destination("type: parquet, path: /data/lake").root) == Path("/data/lake")
    assert destination(TO).levels == ("date",)
    assert destination(f"{TO}, partition_by: [table, action, date]").levels == ("action", "date")


def test_options_of_the_store_are_secrets() -> None:
    body = f"destination: {{{TO}, storage_options: {{AWS_SECRET_ACCESS_KEY: s3cret}}}}"
    assert "s3cret" not in show(read(sink(body)))
    assert "s3cret" not in repr(one(body).destination)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("destination: {type: parquet}", "needs path or url"),
        (f"destination: {{{TO}, path: here}}", "cannot both be given"),
        (f"destination: {{{TO}, partition_by: [date]}}", "should begin with table"),
        (f"destination: {{{TO}, table: all}}", "should hold {table}"),
        (f"destination: {{{TO}, columns: json}}", "columns: typed alone"),
        (f"destination: {{{JSON}, maintenance: {{enabled: false}}}}", "columns: typed alone"),
        (f"destination: {{{TO}}}\nactions: [message]", "message belongs to no table"),
        (f"destination: {{{TO}}}\ntransform: record", "parquet writes columns, not messages"),
        (f"destination: {{{JSON}}}\nrouting: record.id", "parquet has one place"),
        (
            f"destination: {{{TO}}}\nactions: [insert]\nordering: processing_time",
            "not possible with parquet",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(body: str, says: str) -> None:
    assert says in refusal(sink(body))


def test_a_store_needs_a_package_and_a_folder_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> object:
        return None if name == "obstore" else find_spec(name)

    monkeypatch.setattr(cdc.config.extras, "find_spec", without)
    check_extras([one("destination: {type: parquet, path: lake}")])
    with pytest.raises(ConfigError, match=r"obstore.*pip install 'walbrook\[lakehouse\]'"):
        check_extras([one(f"destination: {{{TO}}}")])
