"""Token buckets within bounded memory, and the roles of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import ApiToken, Http, SecretText, loads
from cdc.errors import ConfigError
from cdc.service.http.api.rate_limits import RateLimit
from cdc.service.http.api.refusals import RefusedError
from cdc.service.http.api.tokens import Access, Role


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_is_served_and_then_the_rate() -> None:
    clock = Clock()
    limit = RateLimit(2.0, 3.0, 10, clock)
    for _ in range(3):
        assert limit.wait_s("a") == 0
        limit.count("a")
    assert limit.wait_s("a") == pytest.approx(0.5)
    assert limit.wait_s("b") == 0, "another client has a bucket of its own"
    clock.now_s += 0.5
    assert limit.wait_s("a") == 0


def test_no_more_clients_than_the_bound_are_remembered() -> None:
    limit = RateLimit(1.0, 1.0, 2, Clock())
    for client in ("a", "b", "c"):
        limit.count(client)
    assert limit.wait_s("a") == 0, "the bucket of the one that was first is gone"
    assert limit.wait_s("b") > 0


def token(name: str) -> SecretText:
    return SecretText(f"0123456789abcdef-{name}")


def access(clock: Clock) -> Access:
    return Access(
        Http(
            host="0.0.0.0",
            requests_per_second=2,
            tokens=(
                ApiToken(name="grafana", token=token("read"), role="read"),
                ApiToken(name="on-call", token=token("operate"), role="operate"),
                ApiToken(name="admin", token=token("admin")),
                ApiToken(name="worker", token=token("worker"), consumers=("jobs",)),
            ),
        ),
        clock,
    )


def status(
    access: Access, name: str, role: Role, consumer: str | None = None, *, limited: bool = False
) -> int:
    headers = {"authorization": f"Bearer 0123456789abcdef-{name}"}
    try:
        access.require(headers, consumer, role, client="10.0.0.7", limited=limited)
    except RefusedError as refused:
        return refused.status
    return 200


def test_a_role_may_do_what_the_roles_below_it_may() -> None:
    checked = access(Clock())
    allowed = {
        name: [role.name for role in Role if status(checked, name, role) == 200]
        for name in ("read", "operate", "admin", "worker")
    }
    assert allowed == {
        "read": ["READ"],
        "operate": ["READ", "OPERATE"],
        "admin": ["READ", "OPERATE", "ADMIN"],
        "worker": [],
    }
    assert status(checked, "worker", Role.OPERATE, "jobs") == 200, "fetching has no role"


def test_a_token_that_asks_too_often_is_told_when_to_come_back() -> None:
    clock = Clock()
    checked = access(clock)
    for _ in range(4):
        assert status(checked, "read", Role.READ, limited=True) == 200
    assert status(checked, "read", Role.READ, limited=True) == 429
    assert status(checked, "admin", Role.READ, limited=True) == 200, "others go on"
    clock.now_s += 1
    assert status(checked, "read", Role.READ, limited=True) == 200


def test_wrong_tokens_are_limited_by_address_and_right_ones_are_not() -> None:
    checked = access(Clock())
    seen = [status(checked, "guess", Role.READ) for _ in range(30)]
    assert seen == [401] * 20 + [429] * 10
    assert status(checked, "read", Role.READ) == 200


def test_a_token_for_consumers_has_no_role() -> None:
    text = """
databases: [{name: a, database: a, slot: {name: s}, publication: {name: p}}]
service: {http: {tokens: [{name: t, token: 0123456789abcdef, role: read, consumers: [x]}]}}
"""
    with pytest.raises(ConfigError, match="role and consumers cannot both be given"):
        loads(text, Path("/"))
