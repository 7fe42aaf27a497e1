"""What HTTP answers mean."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime

import pytest

from sinks.http_answers import RETRY_AFTER_MAX_S, Answer, meaning, wait_asked_for

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_every_2xx_is_a_success(status: int) -> None:
    assert meaning(Answer(status), "host") is None


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        ("", 0.0),
        ("0", 0.0),
        ("12", 12.0),
        ("99999999999999999999", RETRY_AFTER_MAX_S),
        ("-5", 0.0),
        ("²", 0.0),
        ("soon", 0.0),
        (format_datetime(NOW.replace(second=20), usegmt=True), 20.0),
        (format_datetime(NOW.replace(hour=11), usegmt=True), 0.0),
        (format_datetime(NOW.replace(hour=13), usegmt=True), RETRY_AFTER_MAX_S),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(retry_after: str, seconds: float) -> None:
    answer = Answer(429, retry_after)
    assert wait_asked_for(answer, now=NOW.timestamp()) == seconds


def test_an_excerpt_is_short_printable_and_without_secrets() -> None:
    answer = Answer(400, excerpt=b"\x1b[31mno\n key=hush " + b"\xff" * 500)
    error = meaning(answer, "host", ["hush"])
    assert error is not None
    assert error.what == "host answered 400"
    assert error.detail.startswith("[31mno  key=*** ")
    assert error.detail.isprintable()
    assert len(error.detail) <= 200


@pytest.mark.parametrize("status", [400, 409, 422])
def test_a_refused_message_says_that_it_is_retried_and_its_row_waits(status: int) -> None:
    error = meaning(Answer(status), "host")
    assert error is not None
    assert "retried by itself" in error.fix
    assert "later ones of its group wait for it" in error.fix
