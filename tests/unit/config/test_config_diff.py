"""What differs between two configurations, how it takes effect, and what of a file may be shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cdc.config import loads
from cdc.config.diff import ChangeKind, ConfigDiff, Effect, diff
from cdc.config.export import exported, with_changed_sections

FILE = """
databases:
  - name: shop
    url: postgres://app:${PW}@db/shop?sslmode=require
    slot: {name: s}
    publication: {name: p, tables: [public.a]}
sinks:
  - name: hook
    batch_size: 10
    destination: {type: webhook, url: "https://h/x", headers: {Authorization: "Bearer canary-1"}}
  - name: lines
    destination: {type: file, path: lines}
state: {url: "postgres://app:canary-2@db/state"}
"""
ENVIRON = {"PW": "canary-3"}


def changes(before: str, after: str) -> ConfigDiff:
    base = Path("/etc/walbrook")
    return diff(loads(before, base, ENVIRON), loads(after, base, ENVIRON))


def test_a_configuration_does_not_differ_from_itself_however_it_is_written() -> None:
    written = FILE.replace("batch_size: 10", 'batch_size: "10"\n    status: active')
    assert changes(FILE, written).changes == ()


def test_a_sink_that_comes_or_goes_takes_effect_at_once() -> None:
    more = FILE.replace(
        "state:", "  - {name: new, destination: {type: file, path: new}}\nstate:", 1
    )
    (added,) = changes(FILE, more).changes
    (removed,) = changes(more, FILE).changes
    assert (added.section, added.name) == ("sink", "new")
    assert (added.kind, added.effect) == (ChangeKind.ADDED, Effect.AT_ONCE)
    assert (removed.kind, removed.effect) == (ChangeKind.REMOVED, Effect.AT_ONCE)


def test_a_changed_sink_begins_again_and_its_keys_are_named() -> None:
    found = changes(FILE, FILE.replace("batch_size: 10", "batch_size: 20"))
    (changed,) = found.changes
    assert str(changed) == "sink hook: changed, its worker begins again\n    batch_size: 10 → 20"
    assert found.named("sink", ChangeKind.CHANGED) == ["hook"]


def test_a_sink_that_is_disabled_ends_at_once() -> None:
    (changed,) = changes(FILE, FILE.replace("batch_size: 10", "status: disabled")).changes
    assert changed.effect is Effect.AT_ONCE


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [
        ("tables: [public.a]", "tables: [public.a, public.b]", Effect.AT_ONCE),
        ("slot: {name: s}", "slot: {name: s}\n    heartbeat_s: 3", Effect.DATABASE),
        ("name: p,", "name: q,", Effect.DATABASE),
    ],
)
def test_a_changed_database_says_what_begins_again(before: str, after: str, effect: Effect) -> None:
    (changed,) = changes(FILE, FILE.replace(before, after)).changes
    assert (changed.section, changed.effect) == ("database", effect)


@pytest.mark.parametrize(
    "section",
    [
        "log: {directory: elsewhere}",
        "spark: {driver_memory: 2g}",
        "service: {http: {port: 1}}",
        "ledger: {type: redis, url: redis://h}",
    ],
)
def test_other_sections_need_a_restart(section: str) -> None:
    found = changes(FILE, FILE + section)
    assert [each.section for each in found.for_restart] == [section.partition(":")[0]]


def test_a_first_database_that_holds_the_state_moves_with_a_restart_alone() -> None:
    without = FILE.partition("state:")[0]
    other = without.replace("@db/", "@elsewhere/")
    (changed,) = changes(without, other).for_restart
    assert (changed.section, changed.name) == ("database", "shop")


def test_a_secret_that_changed_is_named_and_not_shown() -> None:
    found = changes(FILE, FILE.replace("canary-1", "canary-4"))
    (changed,) = found.changes
    assert "destination.headers: another secret" in str(changed)
    assert "canary" not in f"{changed}{found.to_json()}"


def test_an_exported_configuration_keeps_references_and_hides_secrets() -> None:
    config = loads(FILE, Path("/"), ENVIRON)
    found = exported(FILE, config)
    assert "canary" not in found.text
    assert "postgres://app:${PW}@db/shop?sslmode=require" in found.text
    assert found.hidden == ("sinks[0].destination.headers.Authorization", "state.url")
    assert yaml.safe_load(found.text)["state"] == {"url": "postgres://app:***@db/state"}


def test_a_default_in_a_reference_is_a_secret_too() -> None:
    text = FILE.replace("${PW}", "${PW:-canary-5}")
    assert "canary" not in exported(text, loads(text, Path("/"), ENVIRON)).text


def test_an_exported_configuration_without_hidden_secrets_is_the_same_configuration() -> None:
    text = FILE.replace("canary-1", "${ONE}").replace("canary-2", "${TWO}")
    environ = ENVIRON | {"ONE": "canary-1", "TWO": "canary-2"}
    config = loads(text, Path("/"), environ)
    found = exported(text, config)
    assert found.hidden == ()
    assert loads(found.text, Path("/"), environ) == config


def test_what_can_be_applied_is_taken_from_one_file_and_the_rest_from_the_other() -> None:
    running = FILE + "service: {log_level: info}\n"
    wanted = FILE.replace("batch_size: 10", "batch_size: 20") + "service: {log_level: debug}\n"
    both = loads(with_changed_sections(running, wanted), Path("/"), ENVIRON)
    assert both.sinks[0].batch_size == 20
    assert both.service.log_level == "info"
