"""Which table of the lake the changes of a source's table go to, and its folder. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from cdc.config.table import TableName
from cdc.config.table_template import target_name
from cdc.errors import PoisonError

_FOLDER_CHARS_MAX = 200


@dataclass(frozen=True, order=True)
class LakeTarget:
    """A table of the lake."""

    schema: str
    name: str

    @property
    def folder(self) -> str:
        """Its place below the lake's own; hostile names are quoted, with ~ in place of %."""
        return f"{_folder(self.schema)}/{_folder(self.name)}"

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


GAPS = LakeTarget("_walbrook", "gaps")
"""Where changes that will never come are noted."""


@dataclass(frozen=True)
class LakeNames:
    """A template of the names of tables."""

    template: str = "{schema}.{table}"

    def of(self, schema: str, table: str) -> LakeTarget:
        """The target of a source's table."""
        found = target_name(self.template, None, TableName(schema, table))
        return _target(found.schema, found.table)

    def routed(self, route: str) -> LakeTarget:
        """The target that a routing names: schema.table, or a table of public."""
        try:
            named = TableName.parse(route)
        except ValueError as error:
            raise PoisonError(
                f"a routing gave what is no name of a table: {error}",
                fix="make it give table or schema.table",
            ) from None
        return _target(named.schema, named.table)


def _target(schema: str, name: str) -> LakeTarget:
    found = LakeTarget(schema, name)
    if any(len(_folder(part)) > _FOLDER_CHARS_MAX for part in (schema, name)):
        raise PoisonError(
            f"the name of a target table is longer than {_FOLDER_CHARS_MAX} characters as a folder",
            fix="change table or routing of the sink",
        )
    return found


def _folder(part: str) -> str:
    # A percent sign would be quoted once more when the path becomes a URL.
    quoted = quote(part, safe="").replace("~", "~7E").replace("%", "~")
    return quoted.replace(".", "~2E", 1) if quoted.startswith(".") else quoted
