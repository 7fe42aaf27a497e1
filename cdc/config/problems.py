"""What is wrong with a file, in words that say what would be right.

The model's findings are translated here: places as they stand in the file, unknown keys with the
nearest known one. Invariant: a value of the file is never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cdc.config.model import Config, Location, format_location, suggestion

# After these keys the model's locations carry the chosen form, which is not in the file.
_KEYS_WITH_FORMS = ("destination", "tls")
_MESSAGES = {
    "missing": "is required",
    "model_type": "should be a mapping of keys to values",
    "dict_type": "should be a mapping of names to values",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
    "string_type": "should be text",
    "string_too_short": "should not be empty",
}


@dataclass(frozen=True)
class Problem:
    """One thing to correct, where it stands, and what would be right."""

    location: Location
    what: str
    line: int | None = None

    def __str__(self) -> str:
        place = [f"line {self.line}"] if self.line else []
        place += [format_location(self.location)] if self.location else []
        return f"{', '.join(place)}: {self.what}" if place else self.what

    def concerns(self, other: Location) -> bool:
        """Whether this problem explains one at ``other``: the same place, around or within."""
        shared = min(len(self.location), len(other))
        return bool(self.location) and self.location[:shared] == other[:shared]


def model_problems(error: ValidationError) -> Iterator[Problem]:
    """The model's findings, without line numbers."""
    for detail in error.errors(include_input=False, include_url=False):
        yield Problem(_file_location(detail), _what(detail))


def _file_location(detail: ErrorDetails) -> Location:
    # A check of a whole section may know better where in it the problem stands.
    within: Location = detail.get("ctx", {}).get("within", ())
    location: list[str | int] = []
    form_follows = False
    for part in detail["loc"]:
        if not form_follows:
            location.append(part)
        form_follows = not form_follows and part in _KEYS_WITH_FORMS
    if detail["type"].startswith("union_tag"):
        location.append("type")
    return (*location, *within)


def _what(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        key, known = str(detail["loc"][-1]), known_keys(detail["loc"][:-1])
        return f"unknown key; {suggestion(key, known)}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"should be one of {_destination_types()}"
    if kind == "literal_error":
        return f"should be {context['expected']}"
    if kind == "string_pattern_mismatch":
        return "should be a number and a unit, such as 512m or 2g"
    if kind in ("too_short", "too_long"):
        return "should hold at least one entry"
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    message = detail["msg"].removeprefix("Input ")
    return message[:1].lower() + message[1:]


def known_keys(location: tuple[str | int, ...]) -> list[str]:
    """The keys that the model knows at ``location``, which is in the model's form."""
    schema = Config.model_json_schema()
    here: dict[str, Any] = schema
    for part in location:
        here = _step(here, part, schema["$defs"])
    return list(here.get("properties", {}))


def _step(here: dict[str, Any], part: str | int, defs: dict[str, Any]) -> dict[str, Any]:
    if isinstance(part, int):
        below = here["items"]
    elif "properties" in here:
        below = here["properties"][part]
    else:
        below = _form(here, part)
    choices = below.get("anyOf", ())
    if len(choices) == 2 and choices[1] == {"type": "null"}:
        below = choices[0]  # what may be left out has no form of its own
    reference = below.get("$ref", "").rpartition("/")[2]
    return dict(defs[reference]) if reference else dict(below)


def _form(union: dict[str, Any], tag: str) -> dict[str, Any]:
    mapping = union.get("discriminator", {}).get("mapping", {})
    if tag in mapping:
        return {"$ref": mapping[tag]}
    choices = union.get("oneOf", union.get("anyOf", []))
    return next(choice for choice in choices if "$ref" in choice)


def _destination_types() -> str:
    schema = Config.model_json_schema()["$defs"]["SinkConfig"]["properties"]["destination"]
    return ", ".join(schema["discriminator"]["mapping"])
