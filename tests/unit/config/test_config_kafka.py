"""What a Kafka destination takes, and what it refuses."""

from __future__ import annotations

import pytest

from cdc.config import KafkaDestination, show
from cdc.config import extras as extras_module
from cdc.config.extras import check_extras
from cdc.errors import ConfigError
from sinks.kafka import client_settings
from tests.unit.config.config_texts import read, refusal, sink

SECRET = "hunter2"


def kafka(keys: str, of_sink: str = "") -> str:
    servers = "bootstrap_servers: ['a:9092', '[::1]:9093']"
    return sink(f"{of_sink}destination: {{type: kafka, {servers}{keys and ', '}{keys}}}")


def one(keys: str = "", of_sink: str = "") -> KafkaDestination:
    destination = read(kafka(keys, of_sink)).sinks[0].destination
    assert isinstance(destination, KafkaDestination)
    return destination


def test_a_destination_defaults_all_but_its_servers() -> None:
    destination = one()
    assert destination.topic == "walbrook.{schema}.{table}"
    assert (destination.exactly_once, destination.tombstones, destination.schemas) == (False,) * 3
    assert client_settings(destination)["security.protocol"] == "PLAINTEXT"
    assert client_settings(destination)["bootstrap.servers"] == "a:9092,[::1]:9093"


def test_tls_is_verified_unless_it_is_said_otherwise() -> None:
    settings = client_settings(one("tls: true"))
    assert settings["security.protocol"] == "SSL"
    assert settings["enable.ssl.certificate.verification"] is True
    assert settings["ssl.endpoint.identification.algorithm"] == "https"
    settings = client_settings(one("tls: {verify: false}"))
    assert settings["enable.ssl.certificate.verification"] is False


def test_a_token_is_asked_for_by_client_credentials() -> None:
    sasl = "{mechanism: OAUTHBEARER, token_url: 'https://h/t', client_id: c, client_secret: s}"
    settings = client_settings(one(f"tls: true, sasl: {sasl}"))
    assert settings["security.protocol"] == "SASL_SSL"
    assert settings["sasl.oauthbearer.method"] == "oidc"
    assert settings["sasl.oauthbearer.client.secret"] == "s"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("topic: 'a b'", "topic: should be a topic of at most 249"),
        ("topic: 'a.{column}'", "with {schema}, {table} and {sink}"),
        ("cursor_topic: c", "cursor_topic has no use without exactly_once: true"),
        ("exactly_once: true, cursor_topic: 'a/b'", "should be a topic of at most 249"),
        ("tls: {certificate_file: c.pem}", "certificate_file and key_file need each other"),
        ("tls: {verify: false, ca_file: c.pem}", "ca_file has no use with verify: false"),
        ("sasl: {mechanism: PLAIN, username: u}", "PLAIN needs username, password"),
        (
            "sasl: {mechanism: PLAIN, username: u, password: p, client_id: c}",
            "PLAIN has no use for client_id",
        ),
        ("sasl: {mechanism: OAUTHBEARER, client_id: c}", "OAUTHBEARER needs token_url"),
        ("sasl: {mechanism: KERBEROS}", "should be 'PLAIN', 'SCRAM-SHA-256'"),
        ("timeout_ms: 10", "timeout_ms"),
    ],
)
def test_impossible_settings_are_refused_with_the_fix(keys: str, problem: str) -> None:
    assert problem in refusal(kafka(keys))


def test_servers_are_hosts_with_ports() -> None:
    found = refusal(sink("destination: {type: kafka, bootstrap_servers: ['kafka']}"))
    assert "should be a server such as kafka.example.com:9092" in found


@pytest.mark.parametrize(
    "of_sink",
    [
        "",
        "shape: debezium\ntransform: record\n",
        "shape: debezium\ntables: [{name: public.t, group_column_names: [a]}]\n",
    ],
)
def test_schemas_describe_the_debezium_shape_alone(of_sink: str) -> None:
    assert "does not go with schemas: true" in refusal(kafka("schemas: true", of_sink))
    assert one("schemas: true", "shape: debezium\n").schemas


def test_no_secret_is_shown() -> None:
    tls = f"{{certificate_file: c.pem, key_file: k.pem, key_password: {SECRET}}}"
    sasl = f"{{mechanism: PLAIN, username: u, password: {SECRET}}}"
    config = read(kafka(f"tls: {tls}, sasl: {sasl}"))
    for shown in (show(config), repr(config)):
        assert SECRET not in shown
    assert show(read(show(config))) == show(config)


def test_a_sink_whose_client_is_not_installed_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sinks = read(kafka("")).sinks
    check_extras(sinks)
    monkeypatch.setattr(extras_module, "find_spec", lambda _module: None)
    with pytest.raises(ConfigError, match=r"confluent_kafka.*pip install 'walbrook\[kafka\]'"):
        check_extras(sinks)
