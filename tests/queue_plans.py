"""How Postgres carries out the statements of the queue's functions, taken from the functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import psycopg

_SOURCE = """
SELECT p.prosrc FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE n.nspname = 'walbrook' AND p.proname = %s
"""


def statement_of(
    connection: psycopg.Connection[Any], function: str, consumer: int, containing: str
) -> str:
    """The statement of a function that has ``containing`` in it, as it runs for a consumer."""
    row = connection.execute(_SOURCE, (function,)).fetchone()
    assert row is not None, f"there is no function walbrook.{function}"
    (found,) = [
        text
        for text in re.findall(r"\$query\$(.*?)\$query\$", row[0], re.DOTALL)
        if containing in text
    ]
    return str(found).replace("%1$s", str(consumer)).replace("%%", "%")


def explain(
    connection: psycopg.Connection[Any], statement: str, values: Sequence[str], how: str = ""
) -> str:
    """The plan with these literals in place of $1, $2 and so on."""
    filled = re.sub(r"\$(\d+)", lambda match: values[int(match[1]) - 1], statement)
    rows = connection.execute(f"EXPLAIN ({how or 'COSTS OFF'}) {filled}".encode()).fetchall()
    return "\n".join(str(row[0]) for row in rows)
