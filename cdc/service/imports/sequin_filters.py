"""Column filters of Sequin as one expression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cdc.service.imports.imported import Imported, Section

_COMPARISONS: Final = {"=": "=", "==": "=", "!=": "<>", ">": ">", "<": "<", ">=": ">=", "<=": "<="}
_LISTS: Final = {"in": "IN", "not in": "NOT IN"}
_NULLS: Final = {"is null": "IS NULL", "is not null": "IS NOT NULL"}


def expression_of(filters: Sequence[Section], where: str, found: Imported) -> str:
    """All filters joined by AND; one that cannot be written so is a remark."""
    parts = []
    for number, each in enumerate(filters):
        part = _condition(each)
        if part is None:
            found.remark(
                f"{where}[{number}]",
                f"is a condition on {each.get('column_name')} that is not taken over",
                "add it to filter by hand: docs/expressions.md",
            )
        else:
            parts.append(part)
    return " AND ".join(parts)


def _condition(each: Section) -> str | None:
    name, value = each.get("column_name"), each.get("comparison_value")
    operator = str(each.get("operator", "")).lower()
    if each.get("field_path") or not isinstance(name, str) or "`" in name:
        return None
    column = f"record.`{name}`"
    if operator in _NULLS:
        return f"{column} {_NULLS[operator]}"
    if operator in _COMPARISONS and (literal := _literal(value)) is not None:
        return f"{column} {_COMPARISONS[operator]} {literal}"
    if operator in _LISTS and isinstance(value, list) and value:
        literals = [_literal(one) for one in value]
        if all(literals):
            return f"{column} {_LISTS[operator]} ({', '.join(map(str, literals))})"
    return None


def _literal(value: object) -> str | None:
    """A literal of Spark SQL; none for what may mean something else there."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str) and "\\" not in value and "$" not in value:
        return "'" + value.replace("'", "\\'") + "'"
    return None
