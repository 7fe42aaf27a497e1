"""What an import gives: a configuration, and what it could not take over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from cdc.config import loads
from cdc.errors import ConfigError

Section = dict[str, object]

_HEAD: Final = "# Written by walbrook import from {name}. Every key: docs/configuration.md.\n"


@dataclass(frozen=True)
class Remark:
    """Something of the file that has no equivalent, and what to do."""

    where: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.do}"


@dataclass
class Imported:
    """The sections of a configuration as they are found, and the remarks about the rest."""

    databases: list[Section] = field(default_factory=list)
    sinks: list[Section] = field(default_factory=list)
    tokens: list[Section] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    def remark(self, where: str, what: str, do: str) -> None:
        self.remarks.append(Remark(where, what, do))

    def unknown(self, where: str, given: Iterable[str], known: Iterable[str]) -> None:
        """Remark on the keys that were not read."""
        for key in sorted(set(given) - set(known)):
            self.remark(f"{where}.{key}", "has no equivalent", "it is left out")

    def disable(self, sink: Section, where: str) -> None:
        """Without a filter or transform that it had, a sink would send what it must not."""
        sink["status"] = "disabled"
        self.remark(
            f"{where}.status",
            "is disabled, because rows would go out unfiltered or in another form",
            "complete the sink, then remove status: disabled",
        )

    def text(self, name: str) -> str:
        """The configuration as YAML."""
        sections: dict[str, object] = {"databases": self.databases, "sinks": self.sinks}
        if self.tokens:
            sections["service"] = {"http": {"tokens": self.tokens}}
        body = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
        return _HEAD.format(name=name) + body

    def check(self, text: str) -> None:
        """Add what is still wrong with the written file as one more remark."""
        try:
            loads(text, Path("/"), _AnyVariable())
        except ConfigError as error:
            self.remark("the written file", str(error).replace("\n", " "), "correct it by hand")


class _AnyVariable(Mapping[str, str]):
    """Variables of the place where the file will be read: here each has some value."""

    def __getitem__(self, key: str) -> str:
        return "1"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def section(value: object) -> Section:
    """A mapping of the file; an empty one for anything else."""
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {}


def sections(value: object) -> list[Section]:
    return [section(each) for each in value] if isinstance(value, list) else []


def taken(source: Section, keys: Mapping[str, str]) -> Section:
    """The members of ``source`` under their names of ours, those that are given."""
    return {ours: source[theirs] for theirs, ours in keys.items() if source.get(theirs) is not None}
