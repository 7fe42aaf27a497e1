"""The form of an expression: ``none``, one SQL expression, or the name of a Python function.

Only Spark can check an expression; here only its form is checked, so that a slip is
found where the file is read.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import BeforeValidator

from cdc.config.scalars import wrong

NONE: Final = "none"
FUNCTION: Final = "python:"
"""What the name of a Python function begins with."""

_CHARACTERS_MAX: Final = 10_000
_NAME: Final = re.compile(r"python:[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
# Texts, quoted names and comments: what stands in them says nothing of the form.
_QUOTED: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`(?:[^`]|``)*`|--[^\n]*|/\*.*?\*/""", re.DOTALL
)


def is_function_name(text: str) -> bool:
    """Whether it is ``python:package.module:function``."""
    return _NAME.fullmatch(text) is not None


def check_expression(value: object) -> str:
    """The expression in ``value``, without space around it, or ``none``."""
    if value is None or value == NONE:
        return NONE
    if not isinstance(value, str):
        raise wrong("should be none, an expression or python:package.module:function")
    text = value.strip()
    if not text:
        raise wrong("is empty; write none to have no expression")
    if len(text) > _CHARACTERS_MAX:
        raise wrong(
            f"is longer than {_CHARACTERS_MAX} characters; make it shorter, or a Python function"
        )
    if "\0" in text:
        raise wrong("holds a NUL character; take it out")
    if text.startswith(FUNCTION):
        if not is_function_name(text):
            raise wrong("names no function; write python:package.module:function")
        return text
    bare = _QUOTED.sub("", text)
    if ";" in bare:
        raise wrong("holds more than one expression; write one, without a semicolon")
    if not bare.strip() and "'" not in text and '"' not in text and "`" not in text:
        raise wrong("holds only a comment; write none to have no expression")
    return text


ExpressionText = Annotated[str, BeforeValidator(check_expression)]
