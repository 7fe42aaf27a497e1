"""How the text of a YAML scalar becomes a value, and the base of all sections.

The file's scalars reach the model as text; the field's type reads them. So a password ``007`` keeps
its zeros, a log level ``OFF`` is not a boolean, and a value from the environment is read exactly
like one that stands in the file. Invariant: no message here repeats the value, which
may be a secret in the wrong place.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic import WithJsonSchema as Documented
from pydantic_core import PydanticCustomError

from cdc.config.table import TableName
from cdc.config.units import parse_duration, parse_size


def wrong(what: str, *, within: tuple[str | int, ...] = ()) -> PydanticCustomError:
    """A problem in our own words, at the place checked or ``within`` it."""
    return PydanticCustomError("walbrook", what, {"within": within} if within else None)


class Section(BaseModel):
    """A mapping in the file: unknown keys refused, frozen, an empty value means the default."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_means_default(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in cls.model_fields}

    def refuse_together(self, key: str, others: tuple[str, ...]) -> None:
        """Refuse ``key`` beside any of ``others``, if the file gives both."""
        given = [other for other in others if other in self.model_fields_set]
        if key in self.model_fields_set and given:
            raise wrong(f"{key} and {', '.join(given)} cannot both be given; keep one way")


def _integer(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value):
        return int(value)
    raise wrong("should be a whole number")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise wrong("should be true or false")


def _size(value: object) -> int:
    try:
        return parse_size(value) if isinstance(value, str) else _integer(value)
    except ValueError as error:
        message = str(error)
    raise wrong(message)


def _duration(value: object) -> str:
    try:
        text = value.strip() if isinstance(value, str) else ""
        parse_duration(text)
        return text
    except ValueError as error:
        message = str(error)
    raise wrong(message)


def _matching(pattern: str, rule: str) -> BeforeValidator:
    compiled = re.compile(pattern)

    def check(value: object) -> str:
        if isinstance(value, str) and compiled.fullmatch(value):
            return value
        raise wrong(rule)

    return BeforeValidator(check)


def _table(value: object) -> TableName:
    try:
        return TableName.parse(value if isinstance(value, str) else "")
    except ValueError as error:
        message = str(error)
    raise wrong(message)


def resolve(value: object, info: ValidationInfo) -> Path:
    """A path, taken from the folder of the configuration file when there is one."""
    if not isinstance(value, str | Path) or not str(value):
        raise wrong("should be a path")
    base: Any = (info.context or {}).get("base")
    return Path(value) if base is None else Path(os.path.normpath(Path(base) / value))


def _conf_text(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


Integer = Annotated[int, BeforeValidator(_integer)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Size = Annotated[int, BeforeValidator(_size), Documented({"type": "integer", "format": "size"})]
Duration = Annotated[
    str, BeforeValidator(_duration), Documented({"type": "string", "format": "duration"})
]
Port = Annotated[Integer, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]
ConfText = Annotated[str, BeforeValidator(_conf_text)]
LocalPath = Annotated[Path, BeforeValidator(resolve)]
Table = Annotated[
    TableName, PlainValidator(_table), Documented({"type": "string", "format": "table"})
]
Name = Annotated[
    str,
    _matching(
        r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}",
        "should be a name of at most 63 letters, digits, _, . and -, "
        "beginning with a letter or digit",
    ),
]
SlotName = Annotated[
    str, _matching(r"[a-z0-9_]{1,63}", "should be 1 to 63 lower-case letters, digits and _")
]
