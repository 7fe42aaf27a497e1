"""Who may use the API: bearer tokens, or, without any, this machine alone.

Invariants: a token is compared in constant time and never written to a log or an answer;
a token for some consumers opens nothing else; without tokens a page in a browser on this machine,
whatever name it came by, cannot use the API either.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from cdc.config import Http
from cdc.config.hosts import is_loopback
from cdc.service.http.api.refusals import RefusedError

_HOW = "send the header Authorization: Bearer and a token of service.http.tokens"


class Access:
    """What the configuration says of who may do what."""

    def __init__(self, settings: Http) -> None:
        self._open = settings.serves_api
        # Digests have one length, so that a comparison does not tell that of the token either.
        self._tokens = [
            (_digest(each.token.get_secret_value()), each.name, each.consumers)
            for each in settings.tokens
        ]

    def require(self, headers: Mapping[str, str], consumer: str | None) -> str:
        """Refuse who may not act on this consumer; None means on the service as a whole.

        Returns the name of the token, empty without tokens.
        """
        if not self._open:
            raise RefusedError(
                403,
                "the API is not served: the service listens for other machines and has no tokens",
                fix="give service.http.tokens, or set service.http.host to 127.0.0.1",
            )
        if not self._tokens:
            _require_local(headers)
            return ""
        name, consumers = self._known(headers.get("authorization", ""))
        if consumers is not None and consumer not in consumers:
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

    def _known(self, header: str) -> tuple[str, tuple[str, ...] | None]:
        scheme, _, token = header.partition(" ")
        if scheme.lower() == "bearer" and token:
            given = _digest(token.strip())
            # All of them, always: how long it takes says nothing.
            found = [each for each in self._tokens if hmac.compare_digest(each[0], given)]
            if found:
                return found[0][1], found[0][2]
        raise RefusedError(
            401,
            "no token that is known was sent" if header else "a token is required",
            fix=_HOW,
            headers={"WWW-Authenticate": "Bearer"},
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
