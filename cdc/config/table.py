"""The name of a table as a person writes it.

``schema.table``, each part as the catalog spells it; a part with a dot or a double quote in it
stands in double quotes, with ``""`` for a quote; a table alone is one of ``public``. As text a
``TableName`` is the plain ``schema.table``, which is what changes are matched by. The two parts
stay known, so that SQL can be written for a name with dots in it.
"""

from __future__ import annotations

import re
from typing import Self

_PART = r'"(?:[^"]|"")+"|[^".]+'
_NAME = re.compile(f"(?:({_PART})\\.)?({_PART})")

HOW_TO_WRITE = (
    'schema.table, a part with dots or quotes in double quotes, such as shop."a.b"; '
    "table alone is public.table"
)


class TableName(str):
    """A table by schema and name; its text is ``schema.table`` without quotes."""

    __slots__ = ("schema", "table")
    schema: str
    table: str

    def __new__(cls, schema: str, table: str) -> Self:
        name = super().__new__(cls, f"{schema}.{table}")
        name.schema, name.table = schema, table
        return name

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.schema, self.table))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what a person wrote; ``ValueError`` if it names no table."""
        if isinstance(text, cls):
            return text
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"should be a table as {HOW_TO_WRITE}")
        schema, table = match.groups()
        return cls(_bare(schema or "public"), _bare(table))

    def written(self) -> str:
        """The form that ``parse`` reads back."""
        return f"{_quoted(self.schema)}.{_quoted(self.table)}"


def _bare(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def _quoted(part: str) -> str:
    if "." not in part and '"' not in part:
        return part
    return '"' + part.replace('"', '""') + '"'
