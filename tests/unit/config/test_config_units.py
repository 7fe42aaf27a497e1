"""Sizes and secrets: the small readings below the model."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.secrets import SecretText, mask_url
from cdc.config.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("12B", 12),
        ("64MiB", 64 * 2**20),
        ("64MB", 64_000_000),
        ("1GiB", 2**30),
        ("1 gib", 2**30),
        ("2TB", 2 * 10**12),
        ("3KiB", 3072),
    ],
)
def test_a_size_is_read_in_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5GiB", "64 MiBs", "6 4", "64M"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64MiB"):
        parse_size(text)


@given(size=st.integers(min_value=0, max_value=2**60))
def test_a_written_size_reads_back_exactly(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_a_secret_prints_stars_and_survives_a_process_border() -> None:
    secret = SecretText("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
    assert pickle.loads(pickle.dumps(secret)).get_secret_value() == "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://user:pw@host/db", "postgres://user:***@host/db"),
        ("postgres://user@host/db", "postgres://user@host/db"),
        ("postgres://host/db", "postgres://host/db"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("postgres://u:p@w/x?y@host/db", "postgres://u:***@host/db"),
        ("postgres://h/db?sslmode=require&password=pw", None),
        ("postgres:///db?user=a&password=pw@x", None),
        ("https://h/p?pw", None),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str | None) -> None:
    masked = mask_url(url)
    assert "pw" not in masked
    assert shown is None or masked == shown


def test_the_parameters_of_a_url_are_masked_except_the_tls_mode() -> None:
    url = "postgres://h/db?sslmode=require&password=pw"
    assert mask_url(url) == "postgres://h/db?sslmode=require&password=***"
