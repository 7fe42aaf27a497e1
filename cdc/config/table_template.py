"""Templates of the names of target tables, with ``{schema}`` and ``{table}`` of the source."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from cdc.config.scalars import Text, wrong
from cdc.config.table import TableName

TABLE_PLACEHOLDERS = ("{schema}", "{table}")
"""What a template of a table's name may hold."""


def _table_template(template: str) -> str:
    rest = template
    for placeholder in TABLE_PLACEHOLDERS:
        rest = rest.replace(placeholder, "x")
    if re.search(r"[{}\x00]", rest) or rest.count(".") > 1 or not all(rest.split(".")):
        raise wrong(
            "should be a table or schema.table, with {schema} and {table} for those of the source"
        )
    return template


TableTemplate = Annotated[Text, AfterValidator(_table_template)]


def refusal_of_template(template: str) -> str | None:
    """Why a table of this template cannot be reloaded: it may have the rows of several."""
    return None if "{table}" in template else "its table has no {table}, so all tables share one"


def target_name(template: str, target_schema: str | None, table: TableName) -> TableName:
    """The target that a template and one schema for all tables give to a table of the source."""
    parts = [
        part.replace("{schema}", table.schema).replace("{table}", table.table)
        for part in template.split(".")
    ]
    return TableName(target_schema or (parts[0] if len(parts) > 1 else table.schema), parts[-1])
