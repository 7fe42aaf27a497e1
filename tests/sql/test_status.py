"""What ``walbrook status`` prints, at the width of a small terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cdc.service.cli.status_tables import status_tables
from cdc.state.migrate import migrate
from tests.fix_postgres import Database

pytestmark = pytest.mark.migrated

_ROWS = """
INSERT INTO walbrook.sources
       (name, slot, publication, system_identifier, restart_lsn, restart_idx, head_lsn, log_lsn,
        log_idx, state, last_error)
VALUES ('shop', 'walbrook_slot', 'p', '1', '16/B374D848', 123456, '16/B3F4D848', '16/B374D848',
        123457, 'disconnected', 'the server [closed] the connection'),
       ('crm', 'a_slot_with_a_name_of_some_length', 'p', '1', '0/1', 0, NULL, NULL, NULL,
        'stopped', NULL);
INSERT INTO walbrook.feeds (source, last_error)
VALUES ('crm', 'the log is corrupt'), ('shop', NULL);
INSERT INTO walbrook.consumers
       (source, name, cursor_lsn, cursor_idx, delivered, absorbed, active, last_error)
VALUES ('shop', 'orders-to-the-search-index', '16/B374D848', 123456, 123456789, 1234, true, NULL),
       ('shop', 'hook', '16/B374D848', 3, 7, 0, true, 'POST https://example.com/a/long/path/that/'
        'goes/on answered 503 Service Unavailable, and will be asked again in 30 s'),
       ('shop', 'gone', '16/A0000000', 0, 5, 0, false, 'an old error');
UPDATE walbrook.consumers
   SET dead = 1204, state = 'waiting', state_reason = 'its sink failed: POST answered 503',
       retry_at = '2100-01-02 03:04:05'
 WHERE name = 'hook';
SELECT walbrook.make_queue(id) FROM walbrook.consumers;
INSERT INTO walbrook.events (consumer, commit_lsn, commit_idx, due_at, error, commit_timestamp, xid,
                             table_schema, table_name, action, record_pks)
SELECT id, '16/B0000000', n, now(), 'no', now(), 1, 'public', 't', 'insert', '["1"]'
  FROM walbrook.consumers, generate_series(1, 1205) n WHERE name = 'hook';
INSERT INTO walbrook.consumers (source, name, cursor_lsn, state_reason, paused_at)
VALUES ('crm', 'mail', '0/1', 'it is paused', '2026-01-02 03:04:05');
UPDATE walbrook.sources
   SET log_bytes = 3 << 20, earliest_lsn = '16/A0000000', earliest_idx = 7, evicted_lsn = '16/9',
       evicted_idx = 3
 WHERE name = 'shop';
INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, fix, since, resolved_at)
VALUES ('shop', NULL, 'slot_at_risk', 'warning', 'the slot is [about] to lose its WAL',
        'give it room', clock_timestamp() - interval '61 seconds', NULL),
       ('shop', 'hook', 'sink_down', 'error', 'the hook is down', '', now(), NULL),
       ('crm', NULL, 'slot_lost', 'error', 'it was lost once', '', now(), now());
"""


@pytest.fixture
def printed(database: Database) -> str:
    out = io.StringIO()
    with database.connect() as connection:
        migrate(connection)
        connection.execute(_ROWS)
        Console(file=out, width=80).print(status_tables(connection))
    return out.getvalue()


def test_the_status_says_for_which_consumers_messages_wait(printed: str) -> None:
    assert "Waiting to be tried again: hook 1,205" in printed


def test_nothing_is_split_at_80_columns_but_names(printed: str) -> None:
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    (search,) = [line for line in lines if "16/B374D848:123456" in line and "123,456,789" in line]
    assert search.split()[2:6] == ["8", "MiB", search.split()[4], "123,456,789"]
    assert "1,234" in search
    assert "\x1b" not in printed


def test_errors_stand_below_the_tables_as_lines(printed: str) -> None:
    below = " ".join(printed[printed.index("feed crm:") : printed.index("error shop,")].split())
    assert "reader shop: the server [closed] the connection" in below
    assert "feed crm: the log is corrupt" in below
    assert "consumer hook: POST https://example.com" in below
    assert below.endswith("asked again in 30 s")
    assert "an old error" not in printed


def test_a_consumer_that_left_the_configuration_is_shown_as_inactive(printed: str) -> None:
    (gone,) = [line for line in printed.splitlines() if "inactive" in line]
    assert gone.split() == ["gone", "16/A0000000:0", "-", "-", "5", "0", "inactive"]


def test_open_health_events_stand_last_with_what_to_do(printed: str) -> None:
    lines = printed[printed.index("error shop,") :].splitlines()
    assert lines[0].startswith("error shop, consumer hook (for 00:00:0")
    assert lines[0].endswith("the hook is down")
    assert lines[1].startswith("warning shop (for 00:01:0")
    assert "the slot is [about] to lose its WAL" in lines[1]
    assert lines[2] == "  fix: give it room"
    assert "it was lost once" not in printed


def test_the_log_is_reported_in_one_line(printed: str) -> None:
    (line,) = [line for line in printed.splitlines() if line.startswith("Log of")]
    assert line == "Log of shop: 3 MiB from 16/A0000000:7, evicted below 16/9:3"


def test_consumers_that_went_on_without_something_are_named(printed: str) -> None:
    assert "Dead letters ever: hook 1,204" in printed.splitlines()


def test_a_consumer_that_waits_is_named_with_the_reason_and_the_time(printed: str) -> None:
    line = "hook is waiting, tried again at 03:04:05: its sink failed"
    assert line in printed.splitlines(), "the error itself stands below the tables, once"


def test_paused_consumers_are_listed_with_the_time(printed: str) -> None:
    assert "mail is paused since 2026-01-02 03:04:05" in printed.splitlines()


_IN_EVENT_TIME = """
INSERT INTO walbrook.consumers (source, name, cursor_lsn, last_error)
VALUES ('shop', 'orders-of-all-shops', '0/1', 'it is down'),
       ('crm', 'orders-of-all-shops', '0/1', 'it is down');
INSERT INTO walbrook.event_time (consumer, base_lsn, watermark)
VALUES ('orders-of-all-shops', '0/3', 1794928028123456);
INSERT INTO walbrook.event_sources (consumer, ledger, cursor_lsn, cursor_idx, read_lsn, read_idx)
SELECT id, ledger, cursor_lsn, cursor_idx, '0/1', 0
  FROM walbrook.consumers WHERE name = 'orders-of-all-shops';
INSERT INTO walbrook.event_partitions
       (consumer, table_name, watermark, idle_since, buffered, late)
SELECT id, 'public.item_' || n, CASE WHEN n > 1 THEN 1794928028123456 + n END,
       CASE WHEN n >= 10 THEN '2026-01-02'::timestamptz END, 12345678, 1234567
  FROM walbrook.consumers, generate_series(1, 11) n WHERE name = 'orders-of-all-shops';
INSERT INTO walbrook.health_events (source, consumer, kind, severity, what, fix)
SELECT s, 'orders-of-all-shops', 'worker_full', 'error', 'it waits', 'raise it'
  FROM unnest(ARRAY['crm', 'shop']) s;
"""


@pytest.fixture
def in_event_time(database: Database, printed: str) -> str:
    assert "Event time" not in printed, "there was none"
    out = io.StringIO()
    with database.connect() as connection:
        connection.execute("SET timezone = 'UTC'")
        connection.execute(_IN_EVENT_TIME)
        Console(file=out, width=80).print(status_tables(connection))
    return out.getvalue()


def test_watermarks_are_shown_and_who_holds_the_others_back_comes_first(in_event_time: str) -> None:
    lines = in_event_time.splitlines()
    assert max(map(len, lines)) <= 80
    at = next(i for i, line in enumerate(lines) if line.startswith("Event time of"))
    assert lines[at].split(maxsplit=3)[3].rstrip() == (
        "orders-of-all-shops: its watermark is 2026-11-17 15:07:08"
    )
    assert [line.split() for line in lines[at + 1 : at + 5]] == [
        ["source", "table", "watermark", "idle", "since", "buffered", "late"],
        ["crm", "public.item_1", "none", "yet", "12,345,678", "1,234,567"],
        ["shop", "public.item_1", "none", "yet", "12,345,678", "1,234,567"],
        ["crm", "public.item_2", "2026-11-17", "15:07:08", "12,345,678", "1,234,567"],
    ]
    assert lines[at + 21].split()[2:6] == ["2026-11-17", "15:07:08", "Jan", "02"], "idle, so last"
    assert lines[at + 22].rstrip() == "and 2 more in walbrook.watermarks"


def test_a_database_that_has_ended_is_shown_as_that(database: Database, in_event_time: str) -> None:
    assert "finished" not in in_event_time
    database.execute("SELECT walbrook.finish_source('orders-of-all-shops', 'crm')")
    out = io.StringIO()
    with database.connect() as connection:
        Console(file=out, width=80).print(status_tables(connection))
    lines = out.getvalue().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Event time of"))
    assert [line.split()[0] for line in lines[at + 2 : at + 12]] == ["shop"] * 9 + ["crm"]
    assert lines[at + 11].split()[1:5] == ["public.item_1", "none", "yet", "finished"]


def test_a_condition_of_all_databases_of_a_consumer_is_listed_once(in_event_time: str) -> None:
    lines = in_event_time.splitlines()
    assert lines.count("consumer orders-of-all-shops: it is down") == 1
    (full,) = [line for line in lines if line.endswith(": it waits")]
    assert full.startswith("error crm, shop, consumer orders-of-all-shops (for 00:0")


def test_a_consumer_paused_in_one_of_its_databases_is_paused_in_all(
    database: Database, in_event_time: str
) -> None:
    assert "paused since" not in in_event_time.replace("mail is paused since", "")
    database.execute("SELECT walbrook.pause('shop/orders-of-all-shops')")
    out = io.StringIO()
    with database.connect() as connection:
        Console(file=out, width=80).print(status_tables(connection))
    assert out.getvalue().count("orders-of-all-shops is paused since 20") == 2
