"""Windows whose expressions do not fit their tables are told before anything is delivered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.fix_postgres import Database
from tests.service import Service

TABLES = """
CREATE TABLE orders (id int PRIMARY KEY, region text, amount numeric(10, 2), at timestamptz);
CREATE TABLE users (id int PRIMARY KEY, amount text, at timestamptz);
CREATE PUBLICATION pub FOR TABLE orders, users
"""


def sink(name: str, aggregates: Mapping[str, str], **given: object) -> dict[str, object]:
    return {
        "name": name,
        "ordering": "event_time",
        "event_time": {"column": "at"},
        "window": {
            "size": "1m",
            "group_by": {"id": "record.id"},
            "aggregates": dict(aggregates),
        },
        "destination": {"type": "file", "path": f"out/{name}"},
        **given,
    }


def test_config_check_tells_what_is_wrong_with_windows(database: Database, tmp_path: Path) -> None:
    database.execute(TABLES)
    only_orders = {"include_tables": ["public.orders"]}
    service = Service(
        database,
        tmp_path,
        [
            sink("fits", {"n": "count(*)", "total": "sum(record.amount)"}, source=only_orders),
            sink("both", {"total": "sum(record.amount)"}),
            sink("misspelt", {"total": "sum(record.amout)"}, source=only_orders),
            sink("ordered", {"one": "first(record.id)"}),
            sink("off", {"total": "nonsense("}, status="disabled"),
        ],
    )
    wrong = service.run("config", "check")
    assert wrong.returncode == 1
    assert (
        "aggregates.total of the window of consumer both cannot be used on its tables: the column "
        "amount is decimal(10,2) in table public.orders of database shop but string in table "
        "public.users of database shop"
    ) in wrong.stderr
    assert "consumer misspelt cannot be used on its tables: [FIELD_NOT_FOUND]" in wrong.stderr
    assert "(did you mean amount?)" in wrong.stderr
    assert "consumer ordered cannot be used: the function first is refused" in wrong.stderr
    assert "consumer fits" not in wrong.stderr
    assert "consumer off" not in wrong.stderr
    assert "Traceback" not in wrong.stderr
