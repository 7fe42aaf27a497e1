"""A column to group by that is not there is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import Config, loads
from cdc.errors import ConfigError
from cdc.service.checks.groups import check_groups
from tests.fix_postgres import Database
from tests.walbrook_service import _url

TEXT = """
databases:
  - {{name: shop, url: "{url}", slot: {{name: s}}, publication: {{name: p}}}}
sinks:
  - name: hook
    tables: [{{name: '{table}', group_column_names: [{column}]}}]
    destination: {{type: webhook, url: "http://127.0.0.1:1/"}}
"""


def config(url: str, column: str, table: str = "public.orders") -> Config:
    return loads(TEXT.format(url=url, column=column, table=table), Path(), {})


def test_a_misspelt_column_is_named_with_the_nearest(database: Database) -> None:
    database.execute('CREATE TABLE orders (id int PRIMARY KEY, customer int); CREATE SCHEMA "a b"')
    assert check_groups(config(_url(database.dsn), "customer")) == []
    with pytest.raises(ConfigError, match=r"has no column custmer.*did you mean customer"):
        check_groups(config(_url(database.dsn), "custmer"))
    assert check_groups(config(_url(database.dsn), "any", '"a b".later')) == []


def test_a_database_that_does_not_answer_is_said_to_be_unchecked() -> None:
    (unchecked,) = check_groups(config("postgres://u:p@127.0.0.1:1/d", "customer"))
    assert "the columns that sinks group by" in unchecked
