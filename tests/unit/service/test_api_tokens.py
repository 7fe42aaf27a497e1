"""Who may use the API, decided from headers alone."""

from __future__ import annotations

import pytest

from cdc.config import ApiToken, Http, SecretText
from cdc.service.http.api.refusals import RefusedError
from cdc.service.http.api.tokens import Access

ALL = "0123456789abcdef-all"
ORDERS = "0123456789abcdef-orders"
WITH_TOKENS = Access(
    Http(
        host="0.0.0.0",
        tokens=(
            ApiToken(name="ops", token=SecretText(ALL)),
            ApiToken(name="shop", token=SecretText(ORDERS), consumers=("orders",)),
        ),
    )
)
LOCAL = Access(Http())


def status(access: Access, consumer: str | None = "orders", **headers: str) -> int:
    try:
        access.require(headers, consumer)
    except RefusedError as refused:
        said = refused.what + refused.fix
        return 0 if ALL in said or not refused.fix else refused.status
    return 200


def test_a_known_token_opens_what_it_is_for() -> None:
    assert status(WITH_TOKENS, authorization=f"Bearer {ALL}") == 200
    assert status(WITH_TOKENS, None, authorization=f"Bearer {ALL}") == 200
    assert status(WITH_TOKENS, authorization=f"bearer {ORDERS}") == 200


def test_a_token_for_some_consumers_opens_no_other_and_nothing_of_the_whole() -> None:
    assert status(WITH_TOKENS, "users", authorization=f"Bearer {ORDERS}") == 403
    assert status(WITH_TOKENS, None, authorization=f"Bearer {ORDERS}") == 403


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", f"Basic {ALL}", f"Bearer {ALL}x", ALL])
def test_without_a_known_token_nothing_is_served(header: str) -> None:
    assert status(WITH_TOKENS, authorization=header) == 401
    assert status(WITH_TOKENS) == 401


def test_without_tokens_only_programs_on_this_machine_are_served() -> None:
    assert status(LOCAL, host="127.0.0.1:7376") == 200
    assert status(LOCAL, host="localhost:7376") == 200
    assert status(LOCAL, host="[::1]:7376") == 200
    for site in ("none", "same-origin"):
        assert status(LOCAL, **{"host": "127.0.0.1:7376", "sec-fetch-site": site}) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "rebound.example:7376"},
        {"host": "127.0.0.1:7376", "origin": "https://elsewhere.example"},
        {"host": "127.0.0.1:7376", "origin": "null"},
        {"host": "127.0.0.1:7376", "sec-fetch-site": "cross-site"},
        {"host": "127.0.0.1:7376", "sec-fetch-site": "same-site"},
        {"host": "["},
        {},
    ],
)
def test_a_page_in_a_local_browser_is_not_served(headers: dict[str, str]) -> None:
    assert status(LOCAL, **headers) == 403


def test_our_own_page_is_served() -> None:
    assert status(LOCAL, host="127.0.0.1:7376", origin="http://127.0.0.1:7376") == 200


def test_without_tokens_nothing_is_served_on_an_address_that_others_reach() -> None:
    assert status(Access(Http(host="0.0.0.0")), host="127.0.0.1:7376") == 403
