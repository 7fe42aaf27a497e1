"""Sinks that order by event time: their keys, their databases, and what does not go together."""

from __future__ import annotations

import pickle
from itertools import product
from textwrap import indent

import pytest

from cdc.config import Config, SinkConfig, Source, TableTime, Window, show
from cdc.config.units import parse_duration
from spark_pipeline.delivery.matching import Match
from tests.unit.config.config_texts import FILE, databases, read, refusal, sink

ORDERED = "ordering: event_time\nevent_time: {column: at}\n"
WINDOW = "window: {size: 1m, aggregates: {n: count(*)}}\n"
PULL = "destination: {type: pull}"
PARQUET = "destination: {type: parquet, columns: json, path: out}"
WEBHOOK = "destination: {type: webhook, url: 'http://h/'}"


def one(body: str) -> SinkConfig:
    return read(sink(body)).sinks[0]


def event_time(keys: str) -> str:
    return sink(f"ordering: event_time\nevent_time: {{{keys}}}\n{FILE}")


def windowed(keys: str) -> str:
    return sink(f"{ORDERED}window: {{{keys}}}\n{FILE}")


def two_databases(body: str) -> str:
    second = databases().removeprefix("databases:\n").replace("name: shop", "name: crm", 1)
    return f"{databases()}{second}sinks:\n- name: a\n{indent(body, '  ')}\n"


def test_a_sink_keeps_the_order_of_commits_unless_asked() -> None:
    plain = one(FILE)
    assert (plain.ordering, plain.event_time, plain.window) == ("commit", None, None)
    assert (plain.databases, plain.sources) == (None, ("shop",))


def test_a_column_is_all_that_must_be_given() -> None:
    time = one(ORDERED + FILE).event_time
    assert time is not None
    assert (time.type, time.late_policy, time.on_stop) == ("timestamptz", "deliver", None)
    assert (time.late_tolerance_us, time.safety_margin_us) == (0, 0)
    assert (time.idle_timeout_us, time.max_buffer_bytes) == (30_000_000, 256 * 2**20)
    assert not time.emit_watermarks
    assert not time.leaf_partitions


EVERYTHING = """\
databases: [shop, crm]
ordering: event_time
event_time:
  column: created_at
  type: timestamptz
  late_tolerance: 5s
  idle_timeout: 2h
  safety_margin: 100ms
  late_policy: dead_letter
  emit_watermarks: true
  leaf_partitions: true
  max_buffer_bytes: 1MiB
  on_stop: keep
  tables:
    - {name: public.orders, column: placed_at, type: unix_ms, late_tolerance: 1m}
    - {name: public.visits, late_tolerance: 0}
    - {name: '"a.b"."c d"', type: 'python:shop.times:parse'}
window:
  size: 1m
  slide: 10s
  group_by: {region: record.region}
  aggregates: {orders: count(*), total: sum(record.amount)}
destination: {type: file, path: out}
"""


def test_every_key_is_read_shown_and_survives_a_process_border() -> None:
    config = read(two_databases(EVERYTHING))
    (merged,) = config.sinks
    time, window = merged.event_time, merged.window
    assert time is not None
    assert window is not None
    assert (merged.database, merged.sources) == ("shop", ("shop", "crm"))
    assert (time.late_tolerance_us, time.idle_timeout_us) == (5_000_000, 7_200_000_000)
    assert (time.safety_margin_us, time.max_buffer_bytes) == (100_000, 2**20)
    assert (time.late_policy, time.emit_watermarks, time.leaf_partitions) == (
        "dead_letter",
        True,
        True,
    )
    assert (window.size_us, window.slide_us) == (60_000_000, 10_000_000)
    assert window.group_by == {"region": "record.region"}
    assert window.aggregates == {"orders": "count(*)", "total": "sum(record.amount)"}
    assert read(show(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert Config.model_validate(config.model_dump()).sinks[0].sources == ("shop", "crm")


def test_a_table_takes_from_the_sink_what_its_entry_leaves_out() -> None:
    time = read(two_databases(EVERYTHING)).sinks[0].event_time
    assert time is not None
    ours = TableTime("created_at", "timestamptz", 5_000_000)
    assert time.of_table("public", "orders") == TableTime("placed_at", "unix_ms", 60_000_000)
    assert time.of_table("public", "visits") == TableTime("created_at", "timestamptz", 0)
    assert time.of_table("a.b", "c d") == TableTime(
        "created_at", "python:shop.times:parse", 5_000_000
    )
    assert time.of_table("public", "others") == ours
    assert time.of_table("crm", "orders") == ours


def test_a_partition_takes_its_own_entry_or_else_that_of_its_root() -> None:
    tables = "[{name: orders, column: b}, {name: orders_1, column: c}]"
    time = read(event_time(f"column: a, tables: {tables}")).sinks[0].event_time
    assert time is not None
    columns = [
        found.column
        for leaf in ("orders_1", "orders_2", "visits_1")
        if (found := time.of_table("public", leaf, root=("public", leaf[:-2])))
    ]
    assert columns == ["c", "b", "a"]


def test_a_table_that_nothing_speaks_of_has_no_event_time() -> None:
    time = read(event_time("tables: [{name: orders, column: at}]")).sinks[0].event_time
    assert time is not None
    assert time.of_table("public", "orders") == TableTime("at", "timestamptz", 0)
    assert time.of_table("public", "others") is None


def test_the_time_of_the_commit_is_known_from_a_column_of_its_name() -> None:
    keys = """column: commit_timestamp, late_tolerance: 1s, tables: [
      {name: own, column: record.commit_timestamp, type: unix_ms},
      {name: other, column: at}, {name: commit, column: metadata.commit_timestamp}]"""
    time = read(event_time(keys)).sinks[0].event_time
    assert time is not None
    assert time.of_table("public", "any") == TableTime(
        "commit_timestamp", "commit_timestamp", 1_000_000
    )
    assert time.of_table("public", "own") == TableTime("commit_timestamp", "unix_ms", 1_000_000)
    assert time.of_table("public", "other") == TableTime("at", "timestamptz", 1_000_000)
    commit = time.of_table("public", "commit")
    assert commit == TableTime("metadata.commit_timestamp", "commit_timestamp", 1_000_000)
    any_table = time.of_table("public", "any")
    assert any_table is not None
    assert (any_table.may_be_either, commit.may_be_either) == (True, False)


def test_by_the_clock_nothing_has_to_be_given() -> None:
    clock = one("ordering: processing_time\n" + FILE)
    assert clock.in_time_order
    assert clock.event_time is not None
    assert clock.event_time.column is None
    told = one("ordering: processing_time\nevent_time: {emit_watermarks: true}\n" + WINDOW + FILE)
    assert told.event_time is not None
    assert told.event_time.emit_watermarks
    assert told.window is not None
    assert one(ORDERED + FILE).in_time_order
    assert not one(FILE).in_time_order
    assert pickle.loads(pickle.dumps(clock)) == clock


def test_a_stop_flushes_unless_there_is_a_window_or_it_is_asked_to_keep() -> None:
    assert one(ORDERED + FILE).flushes_on_stop
    assert not one(ORDERED + WINDOW + FILE).flushes_on_stop
    assert not read(event_time("column: at, on_stop: keep")).sinks[0].flushes_on_stop
    assert read(event_time("column: at, on_stop: flush")).sinks[0].flushes_on_stop


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("", "sinks[0].event_time.column: is required; name the column"),
        (
            "tables: [{name: a, column: b}, {name: c}]",
            "sinks[0].event_time.tables[1].column: is required, because event_time.column",
        ),
        (
            "column: a, tables: [{name: b}, {name: public.b}]",
            "sinks[0].event_time.tables[1].name: is there twice",
        ),
        (
            "column: commit_timestamp, type: unix_ms",
            "sinks[0].event_time.type: is for columns, and commit_timestamp is the time of the",
        ),
        (
            "column: a, tables: [{name: b, column: metadata.commit_timestamp, type: date}]",
            "sinks[0].event_time.tables[0].type: is for columns, and metadata.commit_timestamp is",
        ),
        ("column: a, idle_timeout: 0", "sinks[0].event_time.idle_timeout: should be more than 0"),
        (
            "column: a, idle_timeout: 30",
            "sinks[0].event_time.idle_timeout: should be a duration such as 100ms",
        ),
        (
            "column: a, late_tolerance: 40000d",
            "sinks[0].event_time.late_tolerance: should be at most 36500d",
        ),
        (
            "column: a, safety_margin: []",
            "sinks[0].event_time.safety_margin: should be a duration",
        ),
        ("column: a, late_policy: ignore", "sinks[0].event_time.late_policy: should be 'drop'"),
        ("column: a, on_stop: drop", "sinks[0].event_time.on_stop: should be 'flush' or 'keep'"),
        ("column: a, max_buffer_bytes: 1023KiB", "sinks[0].event_time.max_buffer_bytes: should be"),
        (
            "column: a, type: 'python:module'",
            "sinks[0].event_time.type: names no function; write python:package.module:function",
        ),
        (
            "column: a, late_tolerence: 5s",
            "sinks[0].event_time.late_tolerence: unknown key; did you mean late_tolerance?",
        ),
        (
            "column: a, tables: [{name: b, colum: c}]",
            "sinks[0].event_time.tables[0].colum: unknown key; did you mean column?",
        ),
    ],
)
def test_a_problem_of_event_time_is_reported_with_its_place(keys: str, problem: str) -> None:
    assert problem in refusal(event_time(keys))


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("size: 1m", "sinks[0].window.aggregates: is required"),
        ("aggregates: {n: count(*)}", "sinks[0].window.size: is required"),
        ("size: 1m, aggregates: {}", "sinks[0].window.aggregates: should hold at least one entry"),
        ("size: 0, aggregates: {n: count(*)}", "sinks[0].window.size: should be more than 0"),
        (
            "size: 1m, slide: 0s, aggregates: {n: count(*)}",
            "sinks[0].window.slide: should be more than 0",
        ),
        (
            "size: 1m, slide: 7s, aggregates: {n: count(*)}",
            "sinks[0].window.slide: size is not a multiple of it",
        ),
        (
            "size: 1m, slide: 2m, aggregates: {n: count(*)}",
            "sinks[0].window.slide: size is not a multiple of it",
        ),
        (
            "size: 1001s, slide: 1s, aggregates: {n: count(*)}",
            "sinks[0].window.slide: puts each change into more than 1000 windows",
        ),
        (
            "size: 1m, group_by: {n: action}, aggregates: {n: count(*)}",
            "sinks[0].window.aggregates.n: is a name of this result already",
        ),
        (
            "size: 1m, aggregates: {N: count(*), n: count(*)}",
            "sinks[0].window.aggregates.n: is a name of this result already",
        ),
        (
            "size: 1m, aggregates: {n: count(*), n: max(1)}",
            "sinks[0].window.aggregates.n: this key is already given",
        ),
        (
            "size: 1m, group_by: {window_start: action}, aggregates: {n: count(*)}",
            "sinks[0].window.group_by.window_start: is a name of this result already",
        ),
        (
            "size: 1m, aggregates: {Window_End: count(*)}",
            "sinks[0].window.aggregates.Window_End: is a name of this result already",
        ),
        (
            "size: 1m, aggregates: {a b: count(*)}",
            "sinks[0].window.aggregates: has a name that is not at most 63 letters",
        ),
        (
            "size: 1m, aggregates: {n: none}",
            "sinks[0].window.aggregates.n: should be an SQL expression",
        ),
        (
            "size: 1m, group_by: {n: 'python:a:b'}, aggregates: {m: count(*)}",
            "sinks[0].window.group_by.n: should be an SQL expression",
        ),
        (
            "size: 1m, aggregates: {n: 'count(*); drop'}",
            "sinks[0].window.aggregates.n: holds more than one expression",
        ),
        (
            "size: 1m, aggregates: {n: count(*)}, sldie: 1s",
            "sinks[0].window.sldie: unknown key; did you mean slide?",
        ),
    ],
)
def test_a_problem_of_a_window_is_reported_with_its_place(keys: str, problem: str) -> None:
    assert problem in refusal(windowed(keys))


def test_windows_of_a_thousand_slides_are_the_most() -> None:
    keys = "size: 1000s, slide: 1s, aggregates: {n: count(*)}"
    window = read(windowed(keys)).sinks[0].window
    assert window == Window(size="1000s", slide="1s", aggregates={"n": "count(*)"})
    assert window.size_us // window.slide_us == 1_000


def test_a_window_without_slide_tumbles() -> None:
    window = one(ORDERED + WINDOW + FILE).window
    assert window is not None
    assert (window.size_us, window.slide_us, window.group_by) == (60_000_000, 60_000_000, {})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "event_time: {column: at}\n" + FILE,
            "sinks[0].event_time: has a meaning with ordering: event_time or processing_time alone",
        ),
        (
            WINDOW + FILE,
            "sinks[0].window: has a meaning with ordering: event_time or processing_time alone",
        ),
        (
            "ordering: event_time\n" + FILE,
            "sinks[0].event_time: is required with ordering: event_time",
        ),
        (
            "ordering: time\n" + FILE,
            "sinks[0].ordering: should be 'commit', 'event_time' or 'processing_time'",
        ),
        (
            "ordering: processing_time\nevent_time: {late_tolerance: 5s}\n" + FILE,
            "sinks[0].event_time.late_tolerance: has no meaning with ordering: processing_time",
        ),
        (
            "ordering: processing_time\nevent_time: {column: at}\n" + FILE,
            "sinks[0].event_time.column: has no meaning with ordering: processing_time",
        ),
        (
            "ordering: processing_time\n" + PULL,
            "sinks[0].ordering: processing_time is not possible with pull yet",
        ),
        (ORDERED + PULL, "sinks[0].ordering: event_time is not possible with pull yet"),
        (
            ORDERED + "partition_count: 2\n" + WEBHOOK,
            "sinks[0].partition_count: above 1 would lose the order of event_time",
        ),
        (
            ORDERED + "actions: [insert, schema_change]\n" + FILE,
            "sinks[0].actions: schema_change has its place between commits",
        ),
        (
            ORDERED.replace("at}", "at, emit_watermarks: true}") + PARQUET,
            "sinks[0].event_time.emit_watermarks: parquet writes rows of tables",
        ),
        (ORDERED + WINDOW + PARQUET, "sinks[0].window: parquet writes rows of tables"),
        (
            ORDERED + WINDOW + "transform: action\n" + FILE,
            "sinks[0].transform: is not possible with a window",
        ),
        (
            ORDERED + WINDOW + "routing: action\ndestination: {type: redis_stream, host: h}",
            "sinks[0].routing: is not possible with a window",
        ),
        (
            ORDERED + WINDOW + "shape: record\n" + FILE,
            "sinks[0].shape: is not possible with a window",
        ),
        (
            ORDERED.replace("at}", "at, on_stop: flush}") + WINDOW + FILE,
            "sinks[0].event_time.on_stop: flush would send results of windows",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(body: str, problem: str) -> None:
    assert problem in refusal(sink(body))


def test_parquet_and_ordinary_webhooks_may_have_event_time() -> None:
    assert one(ORDERED + PARQUET).ordering == "event_time"
    assert one(ORDERED + WEBHOOK).effective_partition_count == 1


def test_a_sink_is_found_by_each_of_its_databases() -> None:
    body = f"databases: [crm, shop]\n{ORDERED}{FILE}\n"
    config = read(two_databases(body))
    assert [s.name for s in config.sinks_of("crm")] == ["a"]
    assert [s.name for s in config.sinks_of("shop")] == ["a"]
    assert config.sinks[0].database == "crm"


def test_one_database_may_be_a_list_of_one() -> None:
    assert read(two_databases(f"databases: [crm]\n{FILE}")).sinks[0].sources == ("crm",)
    assert one(f"databases: [shop]\n{FILE}").database == "shop"


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ("databases: [shop, cmr]", "sinks[0].databases[1]: there is no database 'cmr'; did you"),
        ("databases: [shop, crm, shop]", "sinks[0].databases[2]: is there twice"),
        (
            "database: shop\ndatabases: [shop, crm]",
            "sinks[0].databases: database and databases cannot both be given",
        ),
        ("databases: []", "sinks[0].databases: should hold at least one entry"),
        ("databases: shop", "sinks[0].databases: should be a list"),
        ("databases: [shop, ]\ndatabase:\nstatus: on", "sinks[0].status: should be"),
        ("databases: [shop, [crm]]", "sinks[0].databases[1]: should be text"),
        ("status: active", "sinks[0].database: is required; name one of shop, crm"),
    ],
)
def test_wrong_databases_are_one_problem_at_their_place(names: str, problem: str) -> None:
    found = refusal(two_databases(f"{names}\n{ORDERED}{FILE}"))
    assert problem in found
    assert "problems" not in found


def test_problems_of_databases_are_reported_beside_all_others() -> None:
    found = refusal(two_databases(f"databases: [shop, cmr]\nstatus: on\n{ORDERED}{FILE}"))
    assert "has 2 problems" in found
    assert "sinks[0].databases[1]: there is no database 'cmr'" in found
    assert "sinks[0].status" in found


def test_several_databases_need_event_time() -> None:
    found = refusal(two_databases(f"databases: [shop, crm]\n{FILE}"))
    assert "sinks[0].databases: names several, and commits of different databases have no" in found


def test_a_model_made_in_code_is_checked_for_its_databases_too() -> None:
    config = read(two_databases(EVERYTHING)).model_dump()
    config["sinks"][0]["databases"] = ("shop", "cmr")
    with pytest.raises(ValueError, match=r"sinks\[0\].databases\[1\]: there is no database"):
        Config.model_validate(config)
    config["sinks"][0] |= {"databases": ("crm", "shop"), "database": "shop"}
    with pytest.raises(ValueError, match="cannot both be given"):
        Config.model_validate(config)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("0", 0),
        ("0s", 0),
        ("100ms", 100_000),
        ("5s", 5_000_000),
        (" 1 m ", 60_000_000),
        ("2h", 7_200_000_000),
        ("1d", 86_400_000_000),
        ("36500d", 36_500 * 86_400_000_000),
    ],
)
def test_a_duration_is_read_in_microseconds(text: str, duration: int) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1.5s", "1M", "1us", "1m30s", "١s", "1week"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="100ms"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["36501d", "3153600001s", "999999999999999d"])
def test_a_duration_that_no_clock_reaches_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="should be at most 36500d"):
        parse_duration(text)


def test_a_source_and_those_who_match_changes_agree_on_tables() -> None:
    choices: dict[str, list[tuple[str, ...] | None]] = {
        "include_schemas": [None, ("a",), ("a", "b")],
        "exclude_schemas": [None, ("b",)],
        "include_tables": [None, ("a.t", "b.t")],
        "exclude_tables": [None, ("a.t",), ("b.u",)],
    }
    for values in product(*choices.values()):
        keys = {k: v for k, v in zip(choices, values, strict=True) if v is not None}
        if any({f"include_{k}", f"exclude_{k}"} <= keys.keys() for k in ("schemas", "tables")):
            continue
        source = Source.model_validate(keys)
        match = Match.of(one(FILE).model_copy(update={"source": source}))
        for schema, table in product("abc", "tu"):
            assert source.takes(schema, table) == match.takes(schema, table), keys
