"""Environment variables inside values.

    ${VAR}               the variable; an error if it is not set
    ${VAR:-default}      the default if the variable is not set or empty
    ${VAR:+replacement}  the replacement if the variable is set and not empty, else nothing
    $$                   one $

It works on values that YAML has already read, so what a variable holds can never become structure.
A ``$`` that begins none of these stays as it is, except that a ``${`` of another form is refused:
taking it literally would hide a typing error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_REFERENCE = r"\{([A-Za-z_][A-Za-z0-9_]*)(?:(:[-+])((?:[^}$]|\$(?!\{))*))?\}"
_DOLLAR = re.compile(rf"\$(?:(\$)|{_REFERENCE}|(\{{))")
_WHOLE = re.compile(rf"\$({_REFERENCE})")
REFERENCE = re.compile(rf"(?<!\$)\${_REFERENCE}")
"""One reference; its groups are the variable, the operator and the word behind it."""


class InterpolationError(ValueError):
    """Why a value could not be interpolated; never holds a variable's value."""


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """``text`` with its references replaced."""
    return _DOLLAR.sub(lambda match: _replacement(match, environ), text)


def is_one_reference(text: str) -> bool:
    """Whether ``text`` is one ``${…}`` and nothing else."""
    return _WHOLE.fullmatch(text) is not None


def escape(text: str) -> str:
    """The text that interpolates to ``text``."""
    return text.replace("$", "$$")


def _replacement(match: re.Match[str], environ: Mapping[str, str]) -> str:
    dollar, name, operator, word, malformed = match.groups()
    if dollar:
        return "$"
    if malformed:
        raise InterpolationError(
            "has a ${ that is none of ${VAR}, ${VAR:-default} and ${VAR:+replacement}; "
            "write $${ for the characters themselves"
        )
    if operator == ":-":
        return environ.get(name) or str(word)
    if operator == ":+":
        return str(word) if environ.get(name) else ""
    if name not in environ:
        raise InterpolationError(
            f"needs the environment variable {name}, which is not set; "
            f"set it, or give a default with ${{{name}:-…}}"
        )
    return environ[name]
