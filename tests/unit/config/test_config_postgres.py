"""The postgres destination: how it connects, and which settings go together."""

from __future__ import annotations

import pytest

from cdc.config import PostgresDestination, SinkConfig, show
from tests.unit.config.config_texts import read, refusal, sink

TO = "type: postgres, url: 'postgres://u:s3cret@there:5433/copy'"


def one(body: str) -> SinkConfig:
    return read(sink(body)).sinks[0]


def destination(more: str = "") -> PostgresDestination:
    found = one(f"destination: {{{TO}{more}}}").destination
    assert isinstance(found, PostgresDestination)
    return found


def test_a_mirror_is_the_default_and_takes_every_change_of_tables() -> None:
    a = one(f"destination: {{{TO}}}")
    assert a.actions == ("insert", "update", "delete", "truncate", "schema_change")
    assert (a.effective_batch_size, a.effective_partition_count) == (10_000, 1)
    to = destination()
    assert (to.mode, to.table, to.target_schema, to.own_schema) == (
        "mirror", None, None, "walbrook_sink",
    )  # fmt: skip


def test_a_destination_connects_by_a_url_or_by_its_parts_and_shows_no_secret() -> None:
    assert "port=5433" in destination().dsn()
    parts = one(
        "destination: {type: postgres, hostname: there, database: copy, username: u, "
        "password: s3cret, sslmode: verify-full, sslrootcert: system}"
    ).destination
    assert isinstance(parts, PostgresDestination)
    assert "sslmode=verify-full" in parts.dsn()
    assert "s3cret" in parts.dsn()
    shown = show(read(sink(f"destination: {{{TO}}}")))
    assert "s3cret" not in shown
    assert "postgres://u:***@there:5433/copy" in shown
    assert "s3cret" not in repr(parts)


def test_two_sinks_may_write_to_one_database() -> None:
    both = sink(f"destination: {{{TO}}}") + f"- {{name: b, destination: {{{TO}}}}}\n"
    assert [each.name for each in read(both).sinks] == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("destination: {type: postgres}", "needs url or database"),
        (f"destination: {{{TO}, mode: events, table: '{{table}}'}}", "table: is one table for all"),
        (f"destination: {{{TO}, table: 'a.b.c'}}", "should be a table or schema.table"),
        (f"destination: {{{TO}, table: '{{name}}'}}", "should be a table or schema.table"),
        (f"destination: {{{TO}, retention_days: 3}}", "mode: events alone"),
        (f"destination: {{{TO}, on_rewind: replace}}", "on_rewind: has no use with mode: mirror"),
        (f"actions: [insert, update, delete]\ndestination: {{{TO}}}", "needs truncate with mode"),
        (f"actions: [insert, truncate, message]\ndestination: {{{TO}}}", "belongs to no table"),
        (f"shape: debezium\ndestination: {{{TO}}}", "postgres writes columns"),
        (f"transform: record\ndestination: {{{TO}}}", "postgres writes columns"),
        (f"routing: \"'x'\"\ndestination: {{{TO}, mode: events}}", "has one table for all"),
        (f"partition_count: 2\ndestination: {{{TO}}}", "above 1 is impossible with postgres"),
        (
            f"ordering: processing_time\nactions: [insert, truncate]\ndestination: {{{TO}}}",
            "processing_time is not possible with postgres",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(body: str, says: str) -> None:
    assert says in refusal(sink(body))
