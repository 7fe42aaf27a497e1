"""What ``walbrook status`` prints, at the width of a small terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cdc.service.status import status_tables
from cdc.state.migrate import migrate
from tests.fix_postgres import Database

_ROWS = """
INSERT INTO walbrook.sources
       (name, slot, publication, system_identifier, restart_lsn, restart_idx, head_lsn, log_lsn,
        log_idx, state, last_error)
VALUES ('shop', 'walbrook_slot', 'p', '1', '16/B374D848', 123456, '16/B3F4D848', '16/B374D848',
        123457, 'disconnected', 'the server [closed] the connection'),
       ('crm', 'a_slot_with_a_name_of_some_length', 'p', '1', '0/1', 0, NULL, NULL, NULL,
        'stopped', NULL);
INSERT INTO walbrook.lanes (source, name, last_error)
VALUES ('crm', 'shared', 'the log is corrupt'), ('shop', 'shared', NULL);
INSERT INTO walbrook.consumers
       (source, name, cursor_lsn, cursor_idx, delivered, absorbed, active, last_error)
VALUES ('shop', 'orders-to-the-search-index', '16/B374D848', 123456, 123456789, 1234, true, NULL),
       ('shop', 'hook', '16/B374D848', 3, 7, 0, true, 'POST https://example.com/a/long/path/that/'
        'goes/on answered 503 Service Unavailable, and will be asked again in 30 s'),
       ('shop', 'gone', '16/A0000000', 0, 5, 0, false, 'an old error');
UPDATE walbrook.consumers SET dead = 1204, lane = 'catch_up_1', lane_reason = 'its sink failed'
 WHERE name = 'hook';
SELECT walbrook.make_queue(id) FROM walbrook.consumers;
INSERT INTO walbrook.events (consumer, commit_lsn, commit_idx, due_at, error, commit_timestamp, xid,
                             table_schema, table_name, action, record_pks)
SELECT id, '16/B0000000', n, now(), 'no', now(), 1, 'public', 't', 'insert', '["1"]'
  FROM walbrook.consumers, generate_series(1, 1205) n WHERE name = 'hook';
INSERT INTO walbrook.consumers (source, name, cursor_lsn, lane_reason, paused_at)
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


def test_it_says_for_whom_messages_wait(printed: str) -> None:
    assert "Waiting to be tried again: hook 1,205" in printed


def test_nothing_is_split_at_80_columns_but_names(printed: str) -> None:
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    (search,) = [line for line in lines if "16/B374D848:123456" in line and "123,456,789" in line]
    assert search.split()[2:6] == ["8", "MiB", search.split()[4], "123,456,789"]
    assert "1,234" in search
    assert "\x1b" not in printed


def test_errors_stand_below_the_tables_as_lines(printed: str) -> None:
    below = " ".join(printed[printed.index("lane crm:") : printed.index("error shop,")].split())
    assert "reader shop: the server [closed] the connection" in below
    assert "lane crm: the log is corrupt" in below
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


def test_the_log_is_told_in_one_line(printed: str) -> None:
    (line,) = [line for line in printed.splitlines() if line.startswith("Log of")]
    assert line == "Log of shop: 3 MiB from 16/A0000000:7, evicted below 16/9:3"


def test_who_went_on_without_something_is_named(printed: str) -> None:
    assert "Dead letters ever: hook 1,204" in printed.splitlines()


def test_who_is_served_by_itself_is_told_with_the_reason(printed: str) -> None:
    assert "hook is by itself, in lane catch_up_1: its sink failed" in printed


def test_who_is_paused_is_told_with_the_time(printed: str) -> None:
    assert "mail is paused since 2026-01-02 03:04:05" in printed.splitlines()
