"""``walbrook tail SINK``: the changes of the log as they come, as that sink would get them.

The command becomes a process of the delivery room, which has the code that matches and shapes.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from cdc.service.cli.log import Action
from cdc.service.cli.options import DEFAULT_CONFIG, ConfigPath, Name, command_group

tail_app = command_group()


@tail_app.command()
def tail(
    sink: Name,
    source: Annotated[
        str | None, typer.Option("--source", "-s", help="The database, if the sink reads several.")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", "-t", help="Only this table, as schema.table; repeatable."),
    ] = None,
    action: Annotated[
        list[Action] | None, typer.Option("--action", "-a", help="Only this action; repeatable.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Only this row: schema.table/key, as public.orders/42.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", help="Begin at this cursor; if not given, from now on.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many changes.")] = None,
    no_follow: Annotated[
        bool, typer.Option("--no-follow", help="Stop at the end of the log.")
    ] = False,
    config: ConfigPath = DEFAULT_CONFIG,
) -> None:
    """Print what a sink would get as lines of JSON, row values included; nothing is delivered."""
    given: list[str] = [str(config), sink]
    for name, value in (("--source", source), ("--key", key), ("--from", start)):
        given += [name, value] if value is not None else []
    for name, values in (("--table", table), ("--action", action)):
        for each in values or ():
            given += [name, str(each)]
    given += ["--limit", str(limit)] if limit is not None else []
    given += ["--ends"] if no_follow else []
    sys.stdout.flush()
    module = "spark_pipeline.delivery.tail"
    os.execv(sys.executable, [sys.executable, "-m", module, *given])
