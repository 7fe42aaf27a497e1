"""What is wrong with a source: one sentence each, with the statement that puts it right.

Invariant: a fix can be pasted as it is printed. It stands on lines of its own, and a
comment in it comes after the statements and ends with its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from cdc.errors import SourceError


@dataclass(frozen=True)
class SourceProblem:
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


def ended(text: str) -> str:
    """A person's own SQL with a semicolon that none of its comments swallows."""
    text = text.strip()
    if text.endswith(";"):
        return text
    return f"{text}\n;" if "--" in text.splitlines()[-1] else f"{text};"


class SourceNotReadyError(SourceError):
    """All that a person must change in a source, numbered, each with its fix."""

    def __init__(
        self,
        what: str,
        *,
        fix: str = "",
        kind: str = "",
        detail: str = "",
        problems: Sequence[SourceProblem] = (),
    ) -> None:
        super().__init__(what, fix=fix, kind=kind, detail=detail)
        self.problems = tuple(problems)


def raise_problems(database: str, problems: Sequence[SourceProblem]) -> None:
    """One error for all problems; returns when there is none."""
    if problems:
        listed = "".join(_listed(n, problem) for n, problem in enumerate(problems, 1))
        raise SourceNotReadyError(f"database {database} is not ready:{listed}", problems=problems)


def _listed(number: int, problem: SourceProblem) -> str:
    what, fix = f"\n{number:>3}. ", "\n     fix: "
    return what + problem.what + fix + problem.fix.replace("\n", "\n" + " " * (len(fix) - 1))
