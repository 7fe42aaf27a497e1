"""Which table of the destination the changes of a source's table go to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import sql

from cdc.config.table import TableName
from cdc.config.table_template import target_name
from cdc.errors import PoisonError

NAME_BYTES_MAX = 63


@dataclass(frozen=True, order=True)
class Target:
    """A table of the destination."""

    schema: str
    name: str

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True)
class TargetNames:
    """A template and, in place of the schema that it gives, one schema for all."""

    template: str = "{schema}.{table}"
    schema: str | None = None

    def of(self, schema: str, table: str) -> Target:
        """The target of a source's table."""
        found = target_name(self.template, self.schema, TableName(schema, table))
        return self._target(found.schema, found.table)

    def routed(self, route: str) -> Target:
        """The target that a routing names: schema.table, or a table of public."""
        try:
            named = TableName.parse(route)
        except ValueError as error:
            raise PoisonError(
                f"a routing gave what is no name of a table: {error}",
                fix="make it give table or schema.table",
            ) from None
        return self._target(named.schema, named.table)

    @property
    def follows_renames(self) -> bool:
        """Whether another name of the source's table is another name here."""
        return "{table}" in self.template

    def _target(self, schema: str, name: str) -> Target:
        found = Target(self.schema or schema, name)
        for part in (found.schema, found.name):
            if not part or len(part.encode()) > NAME_BYTES_MAX:
                raise PoisonError(
                    f"the name of a target table is empty or longer than {NAME_BYTES_MAX} bytes",
                    fix="change table, target_schema or routing of the sink",
                )
        return found
