"""From YAML text to plain data, with a line for every place in it.

Scalars stay text, for the model's types to read; only an empty plain value, ``~`` and ``null``
become None. Invariant: structure comes from the file alone, never from a variable, and
no message repeats a scalar of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from cdc.config.interpolate import InterpolationError, interpolate, is_one_reference
from cdc.config.model import Location
from cdc.config.problems import Problem

NODES_MAX = 100_000
_NULLS = ("", "~", "null", "Null", "NULL")


class Unreadable:
    """Stands for a value that already has a problem; the model refuses it at the same place."""


UNREADABLE = Unreadable()
Data = dict[str, "Data"] | list["Data"] | str | Unreadable | None


@dataclass
class Document:
    """Plain data, where each place stands in the text, and what was wrong on the way."""

    environ: Mapping[str, str]
    data: Data = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    nodes: int = 0

    def line(self, location: Location) -> int | None:
        """The line of ``location``, or of the nearest place around it."""
        while location not in self.lines and location:
            location = location[:-1]
        return self.lines.get(location)

    def refuse(self, location: Location, what: str, line: int | None = None) -> Unreadable:
        self.problems.append(Problem(location, what, line or self.line(location)))
        return UNREADABLE

    def read(self, node: yaml.Node, at: Location) -> Data:
        self.nodes += 1
        if self.nodes > NODES_MAX:
            raise RecursionError  # aliases of aliases can make a small file endless
        self.lines.setdefault(at, node.start_mark.line + 1)
        if not node.tag.startswith("tag:yaml.org,2002:"):
            return self.refuse(at, "has a tag; quote a value that begins with !")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*at, i)) for i, item in enumerate(node.value)]
        return self._read_scalar(node, at)

    def _read_mapping(self, node: yaml.MappingNode, at: Location) -> Data:
        data: dict[str, Data] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.refuse(at, "has a key that is not plain text; quote ${…} and braces", line)
                continue
            key = str(key_node.value)
            if key in data:
                before = self.lines[(*at, key)]
                what = f"this key is already given on line {before}; keep one of them"
                self.refuse((*at, key), what, line)
                continue
            self.lines[(*at, key)] = line
            data[key] = self.read(value_node, (*at, key))
        return data

    def _read_scalar(self, node: yaml.Node, at: Location) -> Data:
        text = str(node.value)
        plain = getattr(node, "style", None) is None
        if plain and text in _NULLS:
            return None
        try:
            value = interpolate(text, self.environ)
        except InterpolationError as error:
            return self.refuse(at, str(error))
        # A plain scalar that is one whole reference is read like a value in the file's own text.
        return None if plain and is_one_reference(text) and value in _NULLS else value


def parse(text: str, environ: Mapping[str, str]) -> Document:
    """Read the text; problems are collected, and those of YAML itself end the reading."""
    document = Document(environ)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document.data = {} if node is None else document.read(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        document.refuse((), _syntax(error), mark.line + 1 if mark else None)
    except yaml.YAMLError:
        document.refuse((), "is not YAML: it holds a character that YAML does not allow")
    except RecursionError:
        document.refuse((), "is nested too deep or too large; write it without nested aliases")
    return document


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem or error.context)
    # These two quote the file, where an unquoted secret may stand.
    if isinstance(error, yaml.composer.ComposerError) or "tag handle" in problem:
        problem = "more than one document, or an alias or tag that is not defined"
        return f"is not YAML we can read: {problem}; quote values that begin with *, & or !"
    return f"is not YAML: {problem}; check indentation, colons and quotes here"
