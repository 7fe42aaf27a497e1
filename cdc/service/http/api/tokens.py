"""Who may use the API: bearer tokens, or, without any, this machine alone.

Invariants: a token is compared in constant time and never written to a log or an answer;
a token for some consumers opens nothing else; without tokens a page in a browser on this machine,
whatever name it came by, cannot use the API either.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from urllib.parse import urlsplit

from cdc.config import Http
from cdc.config.hosts import is_loopback
from cdc.service.http.api.rate_limits import RateLimit
from cdc.service.http.api.refusals import RefusedError

_HOW = "send the header Authorization: Bearer and a token of service.http.tokens"
_STRANGERS_PER_S: Final = 5.0
_STRANGERS_AT_ONCE: Final = 20.0
_STRANGERS_MAX: Final = 1_024  # addresses that are remembered


class Role(IntEnum):
    """What a token may do to the service as a whole; each role may do what those below it may."""

    READ = 1
    OPERATE = 2
    ADMIN = 3


@dataclass(frozen=True)
class _Known:
    """A token of the configuration."""

    digest: bytes
    name: str
    consumers: tuple[str, ...] | None
    role: Role


class Access:
    """What the configuration says of who may do what."""

    def __init__(self, settings: Http, clock: Callable[[], float] = time.monotonic) -> None:
        self._open = settings.serves_api
        # Digests have one length, so that a comparison does not tell that of the token either.
        self._tokens = [
            _Known(
                _digest(each.token.get_secret_value()),
                each.name,
                each.consumers,
                Role[each.role.upper()],
            )
            for each in settings.tokens
        ]
        per_s = settings.requests_per_second
        self._requests = RateLimit(per_s, 2 * per_s, max(1, len(self._tokens)), clock)
        self._strangers = RateLimit(_STRANGERS_PER_S, _STRANGERS_AT_ONCE, _STRANGERS_MAX, clock)

    def require(
        self,
        headers: Mapping[str, str],
        consumer: str | None,
        role: Role = Role.ADMIN,
        *,
        client: str = "",
        limited: bool = False,
    ) -> str:
        """Refuse who may not act on this consumer; None means on the service as a whole.

        On the whole, a token must have at least this ``role``. ``client`` is the address of the
        peer, by which wrong tokens are counted; ``limited`` counts the request itself too.
        Returns the name of the token, empty without tokens.
        """
        name = self._admitted(headers, consumer, role, client)
        if limited:
            _refuse_more(self._requests.wait_s(name), f"of token {name}" if name else "here")
            self._requests.count(name)
        return name

    def _admitted(
        self, headers: Mapping[str, str], consumer: str | None, role: Role, client: str
    ) -> str:
        if not self._open:
            raise RefusedError(
                403,
                "the API is not served: the service listens for other machines and has no tokens",
                fix="give service.http.tokens, or set service.http.host to 127.0.0.1",
            )
        if not self._tokens:
            _require_local(headers)
            return ""
        known = self._known(headers.get("authorization", ""), client)
        name, consumers = known.name, known.consumers
        if consumers is None:
            if consumer is None and known.role < role:
                raise RefusedError(
                    403,
                    f"token {name} has the role {known.role.name.lower()}; this needs "
                    f"{role.name.lower()}",
                    fix="use a token of service.http.tokens with that role",
                )
        elif consumer not in consumers:
            if consumer is None:
                raise RefusedError(
                    403,
                    f"token {name} is for fetching messages of some consumers alone",
                    fix="use a token of service.http.tokens that has no consumers",
                )
            raise RefusedError(
                403,
                f"token {name} may not be used for consumer {consumer}",
                fix="use another token, or add it to the token's consumers",
            )
        return name

    def _known(self, header: str, client: str) -> _Known:
        scheme, _, token = header.partition(" ")
        if scheme.lower() == "bearer" and token:
            given = _digest(token.strip())
            # All of them, always: how long it takes says nothing.
            found = [each for each in self._tokens if hmac.compare_digest(each.digest, given)]
            if found:
                return found[0]
        _refuse_more(self._strangers.wait_s(client), "without a token that is known")
        self._strangers.count(client)
        raise RefusedError(
            401,
            "no token that is known was sent" if header else "a token is required",
            fix=_HOW,
            headers={"WWW-Authenticate": "Bearer"},
        )


def _refuse_more(wait_s: float, whose: str) -> None:
    if wait_s > 0:
        raise RefusedError(
            429,
            f"there are too many requests {whose}",
            fix="send them more slowly",
            headers={"Retry-After": str(math.ceil(wait_s))},
        )


def _require_local(headers: Mapping[str, str]) -> None:
    """A page from elsewhere in a local browser names itself as origin, or us by its own name."""
    host = headers.get("host", "")
    try:
        named = urlsplit(f"//{host}").hostname or ""
        origin = headers.get("origin")
        foreign = origin is not None and urlsplit(origin).netloc != host
        # An image or a form of such a page has no origin, but browsers say where it comes from.
        foreign = foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    except ValueError:
        named, foreign = "", True
    if foreign or not is_loopback(named):
        raise RefusedError(
            403,
            "without tokens the API is for programs on this machine alone",
            fix=f"call it as 127.0.0.1 or localhost, or give service.http.tokens and {_HOW}",
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
