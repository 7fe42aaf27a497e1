"""``walbrook init``: looks at a database and writes a configuration and its SQL.

What is not given as an option is asked for on a terminal, and has a default elsewhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.errors import OperatorError
from cdc.service.cli.options import DEFAULT_CONFIG, command_group

if TYPE_CHECKING:
    from cdc.service.proposal import Proposal

init_app = command_group()

_URL = "postgres://localhost:5432/postgres"


@init_app.command()
def init(
    url: Annotated[
        str | None,
        typer.Option(
            help="How you reach the database now, as a URL; its password is not written.",
            envvar="WALBROOK_INIT_URL",
        ),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", "-t", help="Only this table, as schema.table; repeatable."),
    ] = None,
    role: Annotated[str, typer.Option(help="The role that Walbrook is to use.")] = "walbrook",
    name: Annotated[
        str | None, typer.Option(help="What the database is called; if not given, as it is named.")
    ] = None,
    sink: Annotated[
        str | None, typer.Option(help="The first sink: file, parquet, webhook, redis_stream, pull.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write; the SQL stands beside it.")
    ] = DEFAULT_CONFIG,
) -> None:
    """Look at a database, and write walbrook.yaml and the SQL that it needs."""
    from cdc.service.proposal import SINKS, propose

    script = output.with_suffix(".sql")
    for path in (output, script):
        if path.exists():
            raise OperatorError(
                f"{path} is there already, and is not overwritten",
                fix="name another with --output, or remove it",
            )
    address = url or _asked("URL of the database", os.environ.get("DATABASE_URL") or _URL)
    kind = sink or _asked(f"First sink ({', '.join(SINKS)})", SINKS[0])
    found = propose(address, role=role, name=name, tables=table or [], sink=kind)
    _write(output, script, found)


def _asked(question: str, default: str) -> str:
    if not sys.stdin.isatty():
        return default
    return str(typer.prompt(question, default=default))


def _write(output: Path, script: Path, found: Proposal) -> None:
    for path, text in ((output, found.configuration), (script, found.statements)):
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        typer.echo(f"wrote {path}")
    for remark in found.remarks:
        typer.echo(f"note: {remark}")
    typer.echo(
        f"next: psql -f {script} as a superuser or the owner of the tables, set PGPASSWORD to the "
        f"role's password, then walbrook config check --connect -c {output}"
    )
