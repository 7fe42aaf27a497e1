"""The command ``walbrook``: a thin layer over the service and its SQL.

Errors of ours end a command with status 1 and one paragraph that says what to do; a traceback is a
bug. Nothing that takes time to import is imported here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from cdc.errors import WalbrookError
from cdc.service.cli.commands import LazyGroup
from cdc.version import VERSION

app = typer.Typer(
    name="walbrook",
    cls=LazyGroup,
    help="Streams every committed change of a Postgres database to the places that need it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"walbrook {VERSION}")
        raise typer.Exit


@app.callback()
def walbrook(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Streams every committed change of a Postgres database to the places that need it."""


def main() -> None:
    """The entry point; turns our errors into a paragraph and status 1."""
    try:
        app()
    except WalbrookError as error:
        typer.echo(f"walbrook: {error}", err=True)
        raise SystemExit(1) from error
    except Exception as error:
        if not _is_of_a_connection(error):
            raise
        typer.echo(f"walbrook: a database does not answer: {str(error).strip()}", err=True)
        raise SystemExit(1) from error


def _is_of_a_connection(error: Exception) -> bool:
    """Whether psycopg raised it; it is imported already if so."""
    import psycopg

    return isinstance(error, psycopg.OperationalError)


if __name__ == "__main__":
    main()
