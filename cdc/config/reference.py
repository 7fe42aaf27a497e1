"""The reference of every key, written from the model into ``docs/configuration.md``.

Run ``python -m cdc.config.reference`` after a change of the model; a test fails until it is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdc.config.model import Config
from cdc.config.units import format_size

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
EXAMPLE = ROOT / "examples" / "walbrook.yaml"

_OPENING = """\
# Configuration

<!-- Written from the model by `python -m cdc.config.reference`; do not edit it here. -->

Walbrook reads one YAML file. Unknown keys are refused, and every problem is reported at once with
its line, its place and what would be right. A key with an empty value means its default. Relative
paths begin at the folder of the file. Sizes are numbers of bytes or text such as `64MiB` (2^20),
`64MB` (10^6) or `1GiB`. Durations are text such as `100ms`, `5s`, `1m`, `2h` or `1d`, or `0`.
Secrets never appear in errors, logs or the shown configuration.

A table is written `schema.table`, each part as the catalog spells it; a table alone is one of
`public`. A part with a dot or a quote in it stands in double quotes, with `""` for a quote, and the
whole then in single ones, because YAML has quotes of its own: `'"Odd Schema"."odd.table"'`.
"""

_INTERPOLATION = """\
## Environment variables

Values may take environment variables. They are put in after the YAML is read, so what a variable
holds can never change the structure of the file. Keys are never replaced.

| Written | Becomes |
|---|---|
| `${VAR}` | the variable; an error that names it if it is not set |
| `${VAR:-default}` | the default if the variable is not set or empty |
| `${VAR:+replacement}` | the replacement if the variable is set and not empty, else nothing |
| `$$` | one `$` |

Any other `$` stays, but a `${` of another form is refused: write `$${` for the characters. A value
that is one whole reference is read as if it stood in the file, so `port: ${PORT:-5432}` is a number
and an empty result means the default; in quotes, `"${VAR}"`, it is always text.
"""


def render() -> str:
    """The whole page."""
    schema = Config.model_json_schema()
    sections = "\n".join(_sections(schema, "", "The file", schema["$defs"]))
    example = EXAMPLE.read_text(encoding="utf-8")
    return (
        f"{_OPENING}\n{sections}\n{_INTERPOLATION}\n## Example\n\n"
        f"This is `examples/walbrook.yaml`.\n\n```yaml\n{example}```\n"
    )


def _sections(
    schema: dict[str, Any], path: str, heading: str, defs: dict[str, Any]
) -> Iterator[str]:
    """A table for this section, then those of the sections in it."""
    yield f"## {heading}\n\n{_about(schema, path)}| Key | Type | Default | Meaning |"
    yield "|---|---|---|---|"
    for key, field in schema["properties"].items():
        # The model can tell a destination made in code by its class; the file needs the word.
        distinguishes = key == "type" and not field.keys().isdisjoint(("const", "enum"))
        required = distinguishes or key in schema.get("required", ())
        default = "required" if required else _default(field)
        yield f"| `{key}` | {_type(field)} | {default} | {_meaning(field, defs)} |"
    yield ""
    for key, field in schema["properties"].items():
        below = f"{path}.{key}".removeprefix(".") + ("[]" if field.get("type") == "array" else "")
        for name in _references(field):
            word = defs[name]["properties"].get("type", {})
            kinds = [word["const"]] if "const" in word else word.get("enum", ())
            of_type = " or ".join(f"`{kind}`" for kind in kinds)
            title = f"`{below}` of type {of_type}" if of_type else f"`{below}`"
            yield from _sections(defs[name], below, title, defs)


def _about(schema: dict[str, Any], path: str) -> str:
    return f"{schema['description']}\n\n" if path else ""


def _meaning(field: dict[str, Any], defs: dict[str, Any]) -> str:
    # The schema leaves out a description that the section referred to already has.
    return str(field.get("description") or defs[_references(field)[0]]["description"])


def _references(field: dict[str, Any]) -> list[str]:
    """The names of the sections that a field may hold."""
    choices = [field, field.get("items", {}), *field.get("anyOf", ()), *field.get("oneOf", ())]
    return [choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice]


def _type(field: dict[str, Any]) -> str:
    choices = field.get("anyOf", field.get("oneOf"))
    if choices:
        kinds = [_type(choice) for choice in choices if choice.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return "section"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return "one of " + ", ".join(f"`{choice}`" for choice in field["enum"])
    if field["type"] == "array":
        return f"list of: {_type(field['items'])}"
    if field["type"] == "object":
        return f"map of names to: {_type(field['additionalProperties'])}"
    return _scalar_type(field)


def _scalar_type(field: dict[str, Any]) -> str:
    names = {name: name for name in ("size", "duration", "path")}
    names |= {"password": "secret", "table": "`schema.table`"}
    if field.get("format") in names:
        return names[field["format"]]
    if field["type"] == "boolean":
        return "`true` or `false`"
    if field["type"] != "integer":
        return "text"
    low = field.get("ge", field.get("minimum"))
    high = field.get("le", field.get("maximum"))
    bounds = f", {low} to {high}" if high is not None else f", at least {low}"
    return "whole number" + (bounds if low is not None else "")


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    if default is None:
        return ""
    if field.get("format") == "size":
        return f"`{format_size(default)}`"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
