"""What is wrong with a source: one sentence each, with the statement that puts it right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from cdc.errors import SourceError


@dataclass(frozen=True)
class Problem:
    """One sentence without its full stop, and the SQL or the step that fixes it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}"


def statement(template: LiteralString, **names: sql.Composable | str) -> str:
    """SQL for a person to run: names quoted as identifiers unless composed already."""
    parts = {
        key: sql.Identifier(name) if isinstance(name, str) else name for key, name in names.items()
    }
    return sql.SQL(template).format(**parts).as_string(None)


def raise_problems(problems: Sequence[Problem]) -> None:
    """One error for all problems; returns when there is none."""
    if not problems:
        return
    if len(problems) == 1:
        raise SourceError(problems[0].what, fix=problems[0].fix)
    listed = "; ".join(f"({n}) {problem.what}" for n, problem in enumerate(problems, 1))
    raise SourceError(
        f"The source is not ready: {listed}", fix=" ".join(problem.fix for problem in problems)
    )
