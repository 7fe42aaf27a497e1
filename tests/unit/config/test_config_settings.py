"""Log, Spark and service."""

from __future__ import annotations

import socket

import pytest

from cdc.config import Spark
from cdc.config.settings import _OWN_KEYS
from tests.unit.config.config_texts import BASE, databases, read, refusal


def test_the_log_has_its_defaults() -> None:
    log = read(databases()).log
    assert (log.directory, log.durability) == (BASE / "var/log", "fsync")
    assert (log.batch_rows, log.batch_bytes, log.linger_ms) == (16384, 4 * 2**20, 5)
    assert (log.segment_bytes, log.max_bytes) == (64 * 2**20, 16 * 2**30)


def test_an_empty_section_means_its_defaults() -> None:
    assert read(databases() + "log:\nspark: {}\nservice:\n") == read(databases())


def test_the_log_has_three_durabilities() -> None:
    assert read(databases() + "log: {durability: memory}").log.durability == "memory"
    found = refusal(databases() + "log: {durability: on}")
    assert "log.durability: should be 'memory', 'disk' or 'fsync'" in found


def test_a_tier_is_a_url_or_a_directory_beside_the_file() -> None:
    tiers = [
        read(databases() + f"log: {{tier: {{url: {url}}}}}").log.tier
        for url in ("s3://bucket/cold", "cold", "/mnt/cold")
    ]
    assert [tier.url for tier in tiers if tier is not None] == [
        "s3://bucket/cold", str(BASE / "cold"), "/mnt/cold",
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["var/log", "var/log/cold", "{}/var/log", "file://{}/var/x/../log"])
def test_a_tier_lies_outside_the_log(url: str) -> None:
    found = refusal(databases() + f"log: {{tier: {{url: {url.format(BASE)}}}}}")
    assert "log.tier.url: lies in log.directory" in found


@pytest.mark.parametrize("user", ["key:secret", "key", ":secret"])
def test_a_tier_has_no_credentials_in_its_url(user: str) -> None:
    found = refusal(databases() + f"log: {{tier: {{url: 's3://{user}@bucket/cold'}}}}")
    assert "log.tier.url: has credentials in it" in found
    assert "secret" not in found
    url = "abfs://container@account.dfs.core.windows.net/cold"
    tier = read(databases() + f"log: {{tier: {{url: '{url}'}}}}").log.tier
    assert tier is not None
    assert tier.url == url


def test_a_certificate_of_the_log_server_needs_its_key() -> None:
    found = refusal(databases() + "log: {flight: {certificate: a.pem}}")
    assert "log.flight: certificate and private_key go together" in found


def test_the_log_needs_room_for_four_segments() -> None:
    read(databases() + "log: {segment_bytes: 1GiB, max_bytes: 4GiB}")
    found = refusal(databases() + "log: {segment_bytes: 1GiB, max_bytes: 4GB}")
    assert "log: max_bytes is less than 4 × segment_bytes" in found


@pytest.mark.parametrize("size", ["0", "64M", "lots", "[1]", "true"])
def test_a_size_is_positive_and_has_a_known_unit(size: str) -> None:
    found = refusal(databases() + f"log: {{batch_bytes: {size}}}")
    assert "log.batch_bytes: should be" in found


def test_spark_has_its_defaults() -> None:
    spark = read(databases()).spark
    assert (spark.master, spark.app_name, spark.driver_memory) == ("local[*]", "walbrook", "1g")
    assert (spark.ui, spark.log_level, spark.conf) == (False, "ERROR", {})
    assert (spark.micro_batch_rows, spark.micro_batch_bytes) == (200_000, 128 * 2**20)
    assert spark.checkpoint_directory == BASE / "var/spark"


def test_the_log_level_off_is_a_word_and_not_a_boolean() -> None:
    assert read(databases() + "spark: {log_level: OFF}").spark.log_level == "OFF"


def test_further_spark_settings_become_their_text() -> None:
    text = "spark: {conf: {a: 8, b: true, c: 1.50, d: 64m}}"
    assert read(databases() + text).spark.conf == {"a": "8", "b": "true", "c": "1.50", "d": "64m"}


def test_a_spark_setting_with_a_key_of_its_own_is_not_set_twice() -> None:
    found = refusal(databases() + "spark: {conf: {spark.master: yarn}}")
    assert "spark: conf holds spark.master; set spark.master" in found


def test_every_spark_setting_with_a_key_of_its_own_names_it() -> None:
    for name, key in _OWN_KEYS.items():
        assert key in Spark.model_fields
        found = refusal(databases() + f"spark: {{conf: {{{name}: x}}}}")
        assert f"spark: conf holds {name}; set spark.{key} in its place" in found


@pytest.mark.parametrize(
    "master", ["local", "local[2]", "local[*, 4]", "local-cluster[2,1,512]", "spark://127.0.0.1:1"]
)
def test_a_master_on_this_machine_needs_nothing_more(master: str) -> None:
    assert read(databases() + f"spark: {{master: '{master}'}}").spark.master == master


@pytest.mark.parametrize("master", ["loca", "spark://host", "local[x]", "mesos://m:1", "k8s:// x"])
def test_a_master_that_spark_would_not_know_is_refused_at_once(master: str) -> None:
    found = refusal(databases() + f"spark: {{master: '{master}'}}")
    assert "spark.master: should be local, local[N], spark://host:port, yarn or k8s://" in found


@pytest.mark.parametrize("master", ["spark://a:7077,b:7077", "yarn", "k8s://https://k:6443"])
def test_executors_on_other_machines_must_reach_the_log(master: str) -> None:
    on = databases() + f"spark: {{master: '{master}'}}\n"
    assert "log.flight.host: is an address that executors on other" in refusal(on)
    config = read(on + "log: {flight: {host: 10.0.0.5}}")
    assert config.serves_log
    assert config.log.flight.advertised == "10.0.0.5"
    wide = read(on + "log: {flight: {host: 0.0.0.0}}").log.flight
    assert wide.advertised == socket.gethostname()
    found = refusal(on + "log: {flight: {host: 10.0.0.5, enabled: false}}")
    assert "log.flight.enabled: is false, but executors of a cluster read the log" in found


def test_the_log_of_one_machine_is_served_if_asked_for() -> None:
    assert not read(databases()).serves_log
    assert read(databases() + "log: {flight: {enabled: true}}").serves_log


def test_options_of_a_jvm_leave_its_heap_to_the_memory_keys() -> None:
    spark = read(databases() + "spark: {executor_java_options: -Da=b}").spark
    assert spark.executor_java_options == "-Da=b"
    found = refusal(databases() + "spark: {driver_java_options: '-Xss1m -Xmx4g'}")
    assert "spark.driver_java_options: holds -Xmx" in found


def test_levels_of_single_loggers_have_known_names() -> None:
    text = "spark: {log_levels: {org.apache.spark.scheduler: INFO}}"
    assert read(databases() + text).spark.log_levels == {"org.apache.spark.scheduler": "INFO"}
    assert "log_levels" in refusal(databases() + "spark: {log_levels: {org.a: LOUD}}")


def test_a_batch_that_no_arrow_batch_could_hold_is_refused() -> None:
    assert read(databases() + "log: {batch_bytes: 1GiB}").log.batch_bytes == 2**30
    assert "log.batch_bytes: should be" in refusal(databases() + "log: {batch_bytes: 1025MiB}")


def test_driver_memory_is_as_spark_writes_it() -> None:
    assert read(databases() + "spark: {driver_memory: 512m}").spark.driver_memory == "512m"
    assert "such as 512m or 2g" in refusal(databases() + "spark: {driver_memory: much}")


def test_the_service_has_its_defaults() -> None:
    service = read(databases()).service
    assert (service.http.enabled, service.http.host, service.http.port) == (True, "127.0.0.1", 7376)
    assert (service.log_level, service.log_format) == ("info", "console")
    assert service.drain_timeout_s == 30


def test_the_http_port_may_be_0_for_a_free_one() -> None:
    assert read(databases() + "service: {http: {port: 0}}").service.http.port == 0
    assert "service.http.port: should be" in refusal(databases() + "service: {http: {port: 65536}}")
