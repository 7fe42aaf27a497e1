"""A configuration as its file has it, without its secrets: what the state database may keep.

References such as ``${VAR}`` stay as they are written, also in the place of a secret, so what is
exported can be run again. Invariant: a secret that stands in the file itself becomes ``***``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import yaml
from pydantic import BaseModel

from cdc.config.destination import WebhookDestination
from cdc.config.interpolate import REFERENCE
from cdc.config.model import Config, Location, format_location
from cdc.config.secrets import MASK, SecretText, mask_url
from cdc.config.settings import Spark

_CHANGED_ALONE: Final = ("databases", "sinks")
"""The sections that a running service can change."""
_SECRET_SETTING: Final = re.compile(r"secret|password|token|credential|access\.key", re.IGNORECASE)
_HELD: Final = re.compile("(?:(?:Basic|Bearer|Token) )?(?:\x00[0-9]+\x00)*")


@dataclass(frozen=True)
class ExportedConfig:
    """``hidden`` names the places where a secret stood in the file itself."""

    text: str
    hidden: tuple[str, ...]


def exported(text: str, config: Config) -> ExportedConfig:
    """``text`` is the file that ``config`` was read from."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    hidden = []
    for place, node in _secrets(root, config, ()):
        shown = _without_secret(node.value)
        if shown != node.value:
            hidden.append(format_location(place))
            node.value, node.style = shown, None
    return ExportedConfig(_written(root), tuple(hidden))


def with_changed_sections(running: str, wanted: str) -> str:
    """The databases and sinks of ``wanted``; all other sections of ``running``."""
    kept, taken = (_sections(text) for text in (running, wanted))
    pairs = [pair for name, pair in taken.items() if name in _CHANGED_ALONE]
    pairs += [pair for name, pair in kept.items() if name not in _CHANGED_ALONE]
    return _written(yaml.MappingNode("tag:yaml.org,2002:map", pairs))


def _sections(text: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)  # a valid configuration has databases
    return {str(key.value): (key, value) for key, value in root.value}


def _written(root: yaml.Node | None) -> str:
    return str(yaml.serialize(root, Dumper=yaml.SafeDumper, allow_unicode=True, width=100))


def _secrets(
    node: yaml.Node | None, value: object, at: Location
) -> Iterator[tuple[Location, yaml.ScalarNode]]:
    """The scalars of the file that hold a secret, with their places."""
    if isinstance(node, yaml.ScalarNode):
        if isinstance(value, SecretText):
            yield at, node
    elif isinstance(node, yaml.SequenceNode):
        items = value if isinstance(value, list | tuple) else ()
        for i, (item, each) in enumerate(zip(node.value, items, strict=False)):
            yield from _secrets(item, each, (*at, i))
    elif isinstance(node, yaml.MappingNode):
        for key_node, item in node.value:
            key = str(key_node.value)
            yield from _secrets(item, value_of(value, key), (*at, key))


def value_of(section: object, key: str) -> object:
    """What a section has for a key; what may be a secret is one."""
    if isinstance(section, WebhookDestination) and key == "url":
        return SecretText(section.url)  # it may hold what belongs in a header
    if isinstance(section, Spark) and key == "conf":
        return {
            name: SecretText(text) if _SECRET_SETTING.search(name) else text
            for name, text in section.conf.items()
        }
    if isinstance(section, BaseModel):
        return getattr(section, key, None)
    return section.get(key) if isinstance(section, dict) else None


def _without_secret(written: str) -> str:
    """What may be shown of a secret as the file writes it: references, and the rest of a URL."""
    references: list[str] = []

    def held(match: re.Match[str]) -> str:
        if match[2]:  # the default or the replacement may be the secret itself
            return match[0]
        references.append(match[0])
        return f"\x00{len(references) - 1}\x00"

    text = REFERENCE.sub(held, written)
    if not _is_public(text):
        text = mask_url(text, _is_public) if "://" in text else MASK
    return re.sub("\x00([0-9]+)\x00", lambda match: references[int(match[1])], text)


def _is_public(text: str) -> bool:
    """Whether it is made of references alone, perhaps behind the scheme of a header."""
    return _HELD.fullmatch(text) is not None
