"""The demo proves that everything arrived, and its comparison misses nothing that did not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import orjson
import psycopg
import pytest

from cdc.config import load
from demo import ledger
from demo.change import Change
from demo.compare import Comparison, compare, replay
from demo.embedded_redis import find_redis_server
from demo.open_shop import OpenShop
from demo.shop import Connection, Shop, create_shop
from tests.fix_postgres import Database
from tests.waiting import until

RUN_TIMEOUT_S = 580
ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not under pytest's own folder: that one is closed to the account the server runs as.
    with tempfile.TemporaryDirectory(prefix="walbrook-test-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def shop(database: Database) -> Iterator[Connection]:
    """A connection to a database with a shop and its ledger."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        create_shop(connection)
        ledger.create_ledger(connection)
        yield connection


def _demo(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", *options],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(RUN_TIMEOUT_S + 20)
def test_everything_the_shop_wrote_arrived_at_every_sink(directory: Path) -> None:
    with _demo("--seconds", "3", "--seed", "7", "--directory", str(directory / "run")) as demo:
        said, _ = demo.communicate(timeout=RUN_TIMEOUT_S)
    assert demo.returncode == 0, said
    assert "customers already" in said
    verdict = said[said.index("Written against arrived") :]
    sinks = ["file", "parquet"] + ([] if find_redis_server() is None else ["redis"])
    assert all(sink in verdict for sink in sinks)
    assert verdict.count("agrees") == len(sinks)
    assert not (directory / "run" / "postgres" / "data" / "postmaster.pid").exists()


@pytest.mark.sinks
def test_a_demo_that_is_interrupted_leaves_no_server_behind(directory: Path) -> None:
    run = directory / "run"
    with _demo("--directory", str(run)) as demo:
        until("the service to start", (run / "service.log").exists, timeout_s=120)
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate(timeout=120)
    assert demo.returncode == 130, said
    assert not (run / "postgres" / "data" / "postmaster.pid").exists()


def test_a_directory_in_use_is_refused(directory: Path) -> None:
    (directory / "precious").touch()
    with _demo("--directory", str(directory)) as demo:
        said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "is not empty" in said


def test_the_example_stops_with_its_writer_running(directory: Path) -> None:
    with OpenShop(directory) as example:
        assert "walbrook_shop" in example.config_path.read_text()
    assert not (directory / "postgres" / "data" / "postmaster.pid").exists()


def test_the_example_does_without_redis(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("demo.servers.find_redis_server", lambda: None)
    with OpenShop(directory) as example:
        config = load(example.config_path)
    assert [sink.name for sink in config.sinks] == ["file", "parquet"]
    assert "none was found" in capsys.readouterr().err


# What was written: two rows that live on, one that is deleted, one that gets another key.
def _written() -> list[Change]:
    def change(xid: int, idx: int, action: str, key: str, digest: str, old: str = "") -> Change:
        return Change(
            xid, idx, "public.t", action, (key,), (old or key,), (key,), digest, before=None
        )

    return [
        change(1, 0, "insert", "a", "a1"),
        change(1, 1, "insert", "b", "b1"),
        change(2, 0, "update", "a", "a2"),
        change(2, 1, "update", "a", "a3"),
        change(3, 0, "update", "c", "b1", old="b"),
        change(4, 0, "insert", "d", "d1"),
        change(5, 0, "delete", "d", "d1"),
    ]


def _compared(arrived: list[Change]) -> Comparison:
    written = _written()
    return compare("sink", written, arrived, replay(written))


def test_the_same_changes_agree() -> None:
    assert _compared(_written()).agrees


def test_a_replay_follows_deletes_and_new_keys() -> None:
    assert replay(_written()) == {("public.t", ("a",)): "a3", ("public.t", ("c",)): "b1"}


@pytest.mark.parametrize("lost", range(7))
def test_a_lost_message_is_named(lost: int) -> None:
    arrived = _written()
    change = arrived.pop(lost)
    found = _compared(arrived)
    assert not found.agrees
    assert found.missing == [f"missing: {change}"]
    assert not found.unexpected + found.duplicates + found.out_of_order + found.different


def test_two_messages_of_one_key_that_change_places_are_out_of_order() -> None:
    arrived = _written()
    arrived[2], arrived[3] = arrived[3], arrived[2]
    found = _compared(arrived)
    assert found.out_of_order == [f"out of order: {arrived[3]} after {arrived[2]}"]
    assert found.state == ["replay ends in other values: public.t a"]


def test_messages_of_different_keys_may_change_places() -> None:
    arrived = _written()
    arrived[1], arrived[2] = arrived[2], arrived[1]
    assert _compared(arrived).agrees


def test_a_repeated_message_is_a_duplicate() -> None:
    arrived = _written()
    arrived.append(arrived[5])
    found = _compared(arrived)
    assert found.duplicates == [f"duplicate: {arrived[5]}"]
    assert not found.out_of_order


def test_a_message_that_was_never_written_is_unexpected() -> None:
    arrived = [*_written(), replace(_written()[0], xid=99)]
    assert _compared(arrived).unexpected == [f"unexpected: {arrived[-1]}"]


@pytest.mark.parametrize(
    ("altered", "named"),
    [
        ({"digest": "?"}, "record"),
        ({"action": "delete"}, "action"),
        ({"record_pks": ("?",)}, "record_pks"),
        ({"table": "public.u"}, "table"),
    ],
)
def test_an_altered_message_says_what_is_different(altered: dict[str, str], named: str) -> None:
    arrived = _written()
    arrived[2] = replace(arrived[2], **altered)  # type: ignore[arg-type]
    assert _compared(arrived).different == [f"different {named}: {_written()[2]}"]


def test_rows_that_are_not_in_the_ledger_are_not_compared() -> None:
    written = [replace(change, digest=None) for change in _written()]
    assert compare("sink", written, _written(), replay(_written())).agrees


def test_the_ledger_forgets_what_was_rolled_back(shop: Connection) -> None:
    seller = Shop(shop, random.Random(1))
    seller.open()
    before = ledger.written_count(shop)
    seller.change_of_mind()
    assert ledger.written_count(shop) == before
    seller.import_customers(10)
    assert ledger.written_count(shop) == before + 10


def test_the_ledger_replayed_is_the_state_of_the_source(shop: Connection) -> None:
    seller = Shop(shop, random.Random(2))
    seller.open()
    for _ in range(200):
        seller.trade()
    written = ledger.written_changes(shop)
    assert {change.action for change in written} == {"insert", "update", "delete"}
    assert any(change.key != change.old_key for change in written)
    assert replay(written) == ledger.source_state(shop)


# The inserts of an opened shop as messages, their records as Postgres itself writes them in JSON.
_AS_MESSAGES = """
SELECT json_build_object('action', action, 'changes', NULL,
           'record', coalesce(to_json(c), to_json(p)),
           'metadata', json_build_object('xid', xid,
               -- One number is left free before the second table.
               'commit_idx', n - min(n) OVER ()
                   + (table_name <> first_value(table_name) OVER (ORDER BY n))::int,
               'table_schema', 'public', 'table_name', split_part(table_name, '.', 2),
               'record_pks', key))::text
  FROM ledger.entries
  LEFT JOIN customers c ON table_name = 'public.customers' AND c.id::text = key ->> 0
  LEFT JOIN products p ON table_name = 'public.products' AND p.sku = key ->> 0
 ORDER BY n
"""


def _messages(shop: Connection) -> list[bytes]:
    Shop(shop, random.Random(3)).open()
    return [text.encode() for (text,) in shop.execute(_AS_MESSAGES)]


def _judged(shop: Connection, messages: list[bytes]) -> Comparison:
    arrived = ledger.delivered_changes(shop, messages)
    return compare("sink", ledger.written_changes(shop), arrived, ledger.source_state(shop))


def test_a_record_read_back_is_the_row_that_was_written(shop: Connection) -> None:
    messages = _messages(shop)
    assert len(messages) == 32
    assert _judged(shop, messages).findings == []


@pytest.mark.parametrize("column", ["name", "interests", "newsletter", "address", "joined_at"])
def test_a_record_with_one_other_value_is_different(shop: Connection, column: str) -> None:
    other = {
        "name": "?",
        "interests": ["?"],
        "newsletter": None,
        "address": {"city": "?"},
        "joined_at": "2000-01-01 00:00:00+00",
    }
    messages = _messages(shop)
    message = orjson.loads(messages[-1])
    message["record"][column] = other[column]
    found = _judged(shop, [*messages[:-1], orjson.dumps(message)])
    assert [each.partition(":")[0] for each in found.different] == ["different record"]
    assert len(found.state) == 1


def test_a_record_without_one_of_its_columns_is_different(shop: Connection) -> None:
    messages = _messages(shop)
    message = orjson.loads(messages[-1])
    del message["record"]["address"]
    found = _judged(shop, [*messages[:-1], orjson.dumps(message)])
    assert len(found.different) == 1
