"""What an operator is told of backfills that cannot begin, that fail, and that stand in the way."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from cdc.backfill.reading import reading_errors
from cdc.backfill.table import sent_as
from cdc.config import Config, loads
from cdc.config.table import TableName
from cdc.errors import OperatorError
from cdc.service.backfill_check import require_table
from cdc.state.backfill_operators import change_backfill, start_backfill
from cdc.state.backfills import Wait, held_up, report_backfills, waits
from cdc.state.positions import register_source
from tests.fix_postgres import Database
from tests.walbrook_service import _url

_CONFIG = """
databases:
  - {{name: shop, url: "{url}", slot: {{name: s}}, publication: {{name: p}}}}
sinks:
  - name: files
    source: {{exclude_tables: [public.other]}}
    destination: {{type: file, path: f}}
"""
_FAIL = "UPDATE walbrook.backfills SET state = 'failed', error = 'it may not be read'"
_EVENTS = "SELECT kind, what, fix FROM walbrook.health_events WHERE resolved_at IS NULL"


def configured(url: str) -> Config:
    return loads(_CONFIG.format(url=url), Path(), {})


@pytest.mark.migrated
def test_all_failed_backfills_are_named_with_their_commands(database: Database) -> None:
    with database.connect() as state:
        term = register_source(
            state, name="shop", slot="s", publication="p", system_identifier="1", slot_lsn=100,
            consumers=["files"],
        )  # fmt: skip
        started = [start_backfill(state, "files", f"public.t{n}")["id"] for n in range(14)]
        state.execute(_FAIL)
        report_backfills(state, "shop", term)
        ((kind, what, fix),) = database.execute(_EVENTS)
        assert kind == "backfill_failed"
        assert what.startswith("14 backfills have failed: ")
        assert f"{started[9]} of public.t9 into files and 4 more" in what
        assert what.endswith(f"backfill {started[0]}: it may not be read")
        assert f"walbrook backfill retry {started[9]} (" in fix
        assert f"retry {started[10]}" not in fix

        for number in started[1:]:
            change_backfill(state, "cancel", int(str(number)))
        report_backfills(state, "shop", term)
        ((_, what, fix),) = database.execute(_EVENTS)
        assert what == f"backfill {started[0]} of public.t0 into files failed: it may not be read"
        assert fix.startswith(f"walbrook backfill retry {started[0]} (")


@pytest.mark.migrated
def test_a_backfill_that_waits_for_a_minute_is_named_with_what_it_waits_for(
    database: Database,
) -> None:
    with database.connect() as state:
        term = register_source(
            state, name="shop", slot="s", publication="p", system_identifier="1", slot_lsn=100,
            consumers=["files"],
        )  # fmt: skip
        number = int(str(start_backfill(state, "files", "public.item")["id"]))
        state.execute("UPDATE walbrook.backfills SET state = 'running'")
        ago = "UPDATE walbrook.backfills SET {} = clock_timestamp() - interval '2 minutes'"

        def told() -> list[tuple[str, str]]:
            report_backfills(state, "shop", term)
            return [(kind, what) for kind, what, _ in database.execute(_EVENTS)]

        state.execute(ago.format("requested_at").encode())
        held_up(state, "shop", "files", Wait.CHANGES)
        assert told() == []  # the sink fell behind just now
        state.execute(ago.format("waits_since").encode())
        ((kind, what),) = told()
        assert (kind, f"backfill {number} of public.item into files waits: " in what) == (
            "backfill_waits", True,
        )  # fmt: skip
        assert "its sink is behind with changes" in what
        held_up(state, "shop", "files", None)
        assert told() == []
        waits(state, number, Wait.OPEN_TRANSACTIONS, "742 has to end")
        held_up(state, "shop", "files", Wait.SINK)  # says less
        ((_, what),) = told()
        assert what.endswith("742 has to end")


@pytest.mark.migrated
def test_a_backfill_that_stands_in_the_way_is_named_with_what_ends_it(database: Database) -> None:
    with database.connect() as state:
        register_source(
            state, name="shop", slot="s", publication="p", system_identifier="1", slot_lsn=100,
            consumers=["files"],
        )  # fmt: skip
        number = start_backfill(state, "files", "public.item")["id"]
        with pytest.raises(OperatorError, match=f"backfill {number} of .* is under way"):
            start_backfill(state, "files", "public.item")
        state.execute(_FAIL)
        with pytest.raises(OperatorError, match=f"backfill {number} of .* has failed") as caught:
            start_backfill(state, "files", "public.item")
        assert f"walbrook backfill retry {number} " in caught.value.fix
        assert f"walbrook backfill cancel {number} " in caught.value.fix


def test_a_table_that_does_not_exist_is_distinguished_from_one_that_is_not_published(
    database: Database,
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY);"
        "CREATE PUBLICATION p FOR TABLE other"
    )
    with database.connect() as source:
        with pytest.raises(OperatorError, match=r"no table public\.ordres") as caught:
            sent_as(source, "p", TableName("public", "ordres"))
        assert "did you mean public.orders" in caught.value.fix
        with pytest.raises(OperatorError, match="not in the publication") as caught:
            sent_as(source, "p", TableName("public", "orders"))
        source.execute(caught.value.fix.partition(" Then")[0].encode())
        named = TableName("public", "orders")
        assert sent_as(source, "p", named) == [named]


def test_a_command_refuses_a_table_of_which_nothing_comes_and_passes_what_it_cannot_know(
    database: Database,
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY);"
        "CREATE TABLE part (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE part_1 PARTITION OF part DEFAULT;"
        "CREATE PUBLICATION p FOR TABLE orders, other, part"
    )
    shop = configured(_url(database.dsn))
    for known in ("orders", "public.orders", "Orders", "part"):
        require_table(shop, "files", known)
    require_table(shop, "shop/files", "orders")
    with pytest.raises(OperatorError, match=r"no table public\.ordres"):
        require_table(shop, "files", "ordres")
    with pytest.raises(OperatorError, match=r"takes no changes of public\.other"):
        require_table(shop, "files", "other")
    for consumer, table in (("nobody", "ordres"), ("crm/files", "ordres"), ("files", "a.b.c")):
        require_table(shop, consumer, table)  # walbrook.start_backfill says what is wrong
    require_table(configured("postgres://u:p@127.0.0.1:1/d"), "files", "ordres")


@pytest.mark.parametrize(
    ("query", "fix"),
    [
        ("SELECT * FROM item WHERE idd > 1", "a where that fits"),
        ("SELECT * FROM item WHERE id >", "a where that fits"),
        ("SET ROLE pg_monitor; SELECT * FROM item", "grant SELECT"),
    ],
    ids=["column", "syntax", "right"],
)
def test_the_fix_of_a_chunk_that_cannot_be_read_fits_the_error(
    database: Database, query: str, fix: str
) -> None:
    database.execute("CREATE TABLE item (id int PRIMARY KEY)")
    with (
        database.connect() as source,
        pytest.raises(OperatorError) as caught,
        reading_errors(TableName("public", "item"), 10),
    ):
        source.execute(query.encode())
    assert fix in caught.value.fix
    assert isinstance(caught.value.__cause__, psycopg.ProgrammingError)
