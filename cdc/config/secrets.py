"""Values that must not be printed, and URLs printed without theirs.

Invariant: where it is unclear which part of a URL is the secret, the larger part is
masked.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import SecretStr

MASK = "***"
_HARMLESS_PARAMETERS = {"sslmode"}


class SecretText(SecretStr):
    """A secret: prints as ``***``, read with ``get_secret_value()``."""

    def _display(self) -> str:
        return MASK if self.get_secret_value() else ""


def mask(secret: SecretText) -> str:
    """How a secret is shown: URLs keep what is not secret, anything else is ``***``."""
    text = secret.get_secret_value()
    return mask_url(text) if "://" in text else MASK


def mask_url(url: str, is_public: Callable[[str], bool] = lambda _part: False) -> str:
    """``postgres://user:***@host/db``: without password and without parameter values.

    A password, or a value, that ``is_public`` stays.
    """
    scheme, _, rest = url.partition("://")
    # The last @ ends the user part, so that a password with an unescaped @, / or ? stays hidden.
    user, at, place = rest.rpartition("@")
    name, colon, password = user.partition(":")
    if set("/?") & set(name):
        name, colon, password = MASK, "", ""
    if colon and not (password and is_public(password)):
        password = MASK
    place, question, query = place.partition("?")
    masked = [_mask_parameter(each, is_public) for each in query.split("&")] if query else []
    return f"{scheme}://{name}{colon}{password}{at}{place}{question}{'&'.join(masked)}"


def _mask_parameter(parameter: str, is_public: Callable[[str], bool]) -> str:
    key, equals, value = parameter.partition("=")
    if not equals:
        return MASK
    return parameter if key in _HARMLESS_PARAMETERS or is_public(value) else f"{key}={MASK}"
