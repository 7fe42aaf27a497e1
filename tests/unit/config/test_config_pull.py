"""Pull consumers, and the tokens of those who claim from them."""

from __future__ import annotations

from cdc.config import PullDestination
from tests.unit.config.config_texts import databases, read, refusal, sink

TOKEN = "0123456789abcdef"


def http(settings: str) -> str:
    return "service: {http: {" + settings + "}}\n"


def test_a_pull_consumer_has_its_defaults() -> None:
    found = read(sink("destination: {type: pull}")).sinks[0].destination
    assert isinstance(found, PullDestination)
    assert (found.visibility_s, found.max_in_flight, found.max_waiting) == (30, 10_000, 100)
    assert (found.max_messages, found.max_bytes, found.ttl_s) == (None, None, None)


def test_a_sequin_stream_is_a_pull_consumer() -> None:
    found = read(sink("destination: {type: sequin_stream, max_bytes: 1GiB}")).sinks[0].destination
    assert isinstance(found, PullDestination)
    assert found.type == "pull"
    assert found.max_bytes == 2**30


def test_a_pull_consumer_has_nowhere_to_route_to() -> None:
    assert "routing" in refusal(sink("destination: {type: pull}\nrouting: record.region"))


def test_a_pull_consumer_on_an_open_port_needs_tokens() -> None:
    pull = sink("destination: {type: pull}")
    found = refusal(pull + http("host: 0.0.0.0"))
    assert "service.http.host" in found
    assert "service.http.tokens" in found
    read(pull + http(f"host: 0.0.0.0, tokens: [{{name: a, token: {TOKEN}}}]"))
    read(pull + http("host: 0.0.0.0, enabled: false"))
    read(databases() + http("host: 0.0.0.0"))


def test_tokens_are_hard_to_guess_and_never_shown() -> None:
    found = refusal(databases() + http("tokens: [{name: a, token: hunter2}]"))
    assert "service.http.tokens[0].token" in found
    assert "hunter2" not in found


def test_a_token_and_its_name_are_there_once() -> None:
    twice = http(f"tokens: [{{name: a, token: {TOKEN}}}, {{name: b, token: {TOKEN}}}]")
    found = refusal(databases() + twice)
    assert "service.http.tokens[1].token: is there twice" in found
    assert TOKEN not in found
    named = http(f"tokens: [{{name: a, token: {TOKEN}}}, {{name: a, token: {TOKEN}x}}]")
    assert "service.http.tokens[1].name: is there twice" in refusal(databases() + named)
