"""Values that must not be printed, and URLs printed without theirs.

Invariant: where it is unclear which part of a URL is the secret, the larger part is
masked.
"""

from __future__ import annotations

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


def mask_url(url: str) -> str:
    """``postgres://user:***@host/db``: without password and without parameter values."""
    scheme, _, rest = url.partition("://")
    # The last @ ends the user part, so that a password with an unescaped @, / or ? stays hidden.
    user, at, place = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    if set("/?") & set(name):
        name, colon = MASK, ""
    place, question, query = place.partition("?")
    masked = [_mask_parameter(parameter) for parameter in query.split("&")] if query else []
    credentials = f"{name}{colon}{MASK if colon else ''}{at}"
    return f"{scheme}://{credentials}{place}{question}{'&'.join(masked)}"


def _mask_parameter(parameter: str) -> str:
    key, equals, _ = parameter.partition("=")
    if not equals:
        return MASK
    return parameter if key in _HARMLESS_PARAMETERS else f"{key}={MASK}"
