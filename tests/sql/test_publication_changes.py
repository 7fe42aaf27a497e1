"""Publications that are altered while their sources are read: all of them, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import sql

from cdc.config import Config, loads
from cdc.errors import SourceError
from cdc.service.live_config.new_tables import newly_taken
from cdc.service.live_config.publications import changed_publications
from tests.fix_postgres import Database
from tests.walbrook_service import _url

CONFIG = """
databases:
  - name: shop
    url: {url}
    slot: {{name: s, create_if_not_exists: true}}
    publication: {{name: pub, create_if_not_exists: true, tables: [{tables}]}}
sinks:
  - name: all
    initial_backfill: {backfill}
    destination: {{type: file, path: all}}
"""


def config(url: str, *tables: str, backfill: str = "true") -> Config:
    return loads(CONFIG.format(url=url, tables=", ".join(tables), backfill=backfill), Path("/"), {})


def published(database: Database) -> list[str]:
    rows = database.execute(
        "SELECT tablename::text FROM pg_publication_tables WHERE pubname = 'pub' ORDER BY 1"
    )
    return [name for (name,) in rows]


@pytest.fixture
def shop(database: Database) -> Database:
    for table in ("a", "b", "c"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR TABLE a, b")
    return database


def test_a_list_of_tables_becomes_another_list(shop: Database) -> None:
    before = config(_url(shop.dsn), "public.a", "public.b")
    after = config(_url(shop.dsn), "public.b", "public.c")
    with changed_publications(before, after, after) as found:
        assert [str(table) for table in sorted(found["shop"].after)] == ["public.b", "public.c"]
    assert published(shop) == ["b", "c"]
    assert newly_taken(before, after, found) == [("all", "public.c")]


def test_a_trial_and_a_failure_leave_the_publication_as_it_was(shop: Database) -> None:
    before, after = config(_url(shop.dsn), "public.a"), config(_url(shop.dsn), "public.c")
    with changed_publications(before, after, after, trial=True) as found:
        assert [str(table) for table in sorted(found["shop"].after)] == ["public.b", "public.c"]
    assert published(shop) == ["a", "b"]
    with pytest.raises(LookupError), changed_publications(before, after, after):
        raise LookupError
    assert published(shop) == ["a", "b"]


def test_tables_that_are_there_or_gone_already_are_no_error(shop: Database) -> None:
    before = config(_url(shop.dsn), "public.a", "public.c")
    after = config(_url(shop.dsn), "public.a", "public.b")
    with changed_publications(before, after, after):
        pass
    assert published(shop) == ["a", "b"]


def test_a_role_that_may_not_alter_gets_the_statement(shop: Database) -> None:
    role = f"reader_{shop.name}"
    named = sql.Identifier(role)
    with shop.connect() as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'p'").format(named))
    try:
        host = _url(shop.dsn).partition("@")[2]
        url = f"postgres://{role}:p@{host}"
        before, after = config(url, "public.a", "public.b"), config(url, "public.a", "public.c")
        with (
            pytest.raises(SourceError) as refusal,
            changed_publications(before, after, after),
        ):
            pass
        assert refusal.value.fix.startswith('ALTER PUBLICATION "pub" ADD TABLE "public"."c"; as')
        assert published(shop) == ["a", "b"]
    finally:
        with shop.connect() as connection:
            connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(named))


def test_a_sink_without_initial_backfill_gets_no_existing_rows(shop: Database) -> None:
    before = config(_url(shop.dsn), "public.a", backfill="false")
    after = config(_url(shop.dsn), "public.a", "public.c", backfill="false")
    with changed_publications(before, after, after) as found:
        pass
    assert newly_taken(before, after, found) == []
