"""The configuration of a running service: its file as it was applied, and what the processes read.

Processes of the service read a copy: the file may be edited at any time, and what is in it counts
from the next apply on. Invariant: the copy is for the service's own account alone, as the file may
have secrets in it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cdc.config import Config, loads
from cdc.config.export import exported, with_changed_sections
from cdc.config.load import read_file
from cdc.log.files import FILE_MODE, make_directory


@dataclass(frozen=True)
class ConfigFile:
    """A configuration with the text that it was read from."""

    config: Config
    text: str
    path: Path

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a file; ConfigError with everything that is wrong with it."""
        path = path.absolute()
        return cls._of(read_file(path), path)

    @classmethod
    def _of(cls, text: str, path: Path) -> ConfigFile:
        return cls(loads(text, path.parent.resolve(), origin=str(path)), text, path)

    @property
    def base(self) -> Path:
        """Where relative paths begin."""
        return self.path.parent.resolve()

    @property
    def sources(self) -> list[str]:
        return [database.name for database in self.config.databases]

    def document(self) -> str:
        """The text without its secrets."""
        return exported(self.text, self.config).text

    def with_changes_of(self, other: ConfigFile) -> ConfigFile:
        """What a running service can take over of another file."""
        return self._of(with_changed_sections(self.text, other.text), self.path)


class ConfigCopy:
    """The copy that the processes of one run of the service read."""

    def __init__(self, first: ConfigFile) -> None:
        directory = first.config.log.directory
        make_directory(directory)
        self.path = directory / f".{first.sources[0]}.running.yaml"
        self.base = first.base
        self._draft = self.path.with_suffix(".draft")
        self.prepare(first)
        self.replace()

    def prepare(self, file: ConfigFile) -> None:
        """Write another one beside it, which no process reads before ``replace``."""
        handle = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        with os.fdopen(handle, "w", encoding="utf-8") as file_to_write:
            file_to_write.write(file.text)

    def replace(self) -> None:
        """What was prepared counts: a process that reads it meanwhile has the one or the other."""
        self._draft.replace(self.path)

    def discard(self) -> None:
        """What was prepared does not count."""
        self._draft.unlink(missing_ok=True)

    def remove(self) -> None:
        self.discard()
        self.path.unlink(missing_ok=True)
