"""``walbrook repair``: begin the repair of a source, watch it, and show what repairs did."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated

import typer

from cdc.connection import Connection
from cdc.cursor import format_lsn
from cdc.errors import OperatorError
from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    act_as_user,
    command_group,
    print_json,
    state_of,
)
from cdc.service.cli.row_listing import Row, print_rows
from cdc.state.operators import State
from cdc.state.repairs import consumers_without_rows, repaired_tables, repairs

repair_app = command_group()

_LOOK_S = 0.5
_HEADINGS = ("consumer", "table", "state", "rows by", ">rows", ">deletes")


class _Deletes(StrEnum):
    FIND = "find"
    SKIP = "skip"


@repair_app.command()
def repair(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The database's name.")],
    deletes: Annotated[
        _Deletes,
        typer.Option(
            help="find: refuse, unless rows deleted meanwhile can be found for every consumer. "
            "skip: where they cannot be found, they stay at the destination."
        ),
    ] = _Deletes.FIND,
    status: Annotated[
        bool, typer.Option("--status", help="Begin nothing: show the last repair of the source.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it has ended; the service has to run.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which --wait ends; the repair goes on.", min=1)
    ] = 86_400,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Bridge what a lost slot has lost: a new slot, and the rows that changed meanwhile."""
    if not status:
        from cdc.config import load
        from cdc.service.process.repair import repair as begin

        act_as_user()
        begun = begin(load(config), source, deletes=deletes.value)
        typer.echo(
            f"repair {begun.id} of {source} ({begun.found}) has begun: the new slot begins at "
            f"{format_lsn(begun.lsn)}; the service does the rest: start it if it does not run",
            err=as_json,
        )
    with state_of(config) as state:
        last = _watch(state, source, timeout) if wait else _last(state, source)
        if last is None:
            if as_json:
                print_json([])
            else:
                typer.echo(f"no repairs of {source}")
            return
        if as_json:
            number = int(str(last["id"]))
            without = consumers_without_rows(state, number)
            tables = repaired_tables(state, number)
            print_json({**last, "without_rows": without, "by_table": tables})
        else:
            _show(state, last)
    if last["state"] == "failed":
        raise typer.Exit(1)


def _last(state: Connection, source: str) -> State | None:
    found = repairs(state, source)
    return found[0] if found else None


def _watch(state: Connection, source: str, timeout_s: float) -> State | None:
    """The last repair once it has ended or needs an operator."""
    deadline = time.monotonic() + timeout_s
    while (last := _last(state, source)) is not None and last["state"] == "running":
        if time.monotonic() > deadline:
            raise OperatorError(
                f"the repair of {source} takes longer than the timeout; it goes on",
                fix="see that the service runs (walbrook status), or raise --timeout",
                kind="timeout",
            )
        time.sleep(_LOOK_S)
    return last


def _show(state: Connection, repair: State) -> None:
    number = int(str(repair["id"]))
    typer.echo(
        f"repair {repair['id']} is {repair['state']}: {repair['tables_done']} of "
        f"{repair['tables']} tables, {repair['rows']:,} rows, {repair['deleted']:,} deletes"
    )
    for row in consumers_without_rows(state, number):
        typer.echo(f"consumer {row['consumer']} gets its gap and no rows: {row['reason']}")
    found = repaired_tables(state, number)
    print_rows(_HEADINGS, [Row(_cells(row), _notes(row)) for row in found])


def _notes(row: State) -> list[str]:
    notes = (row["error"] or row["reason"], row["whole_reason"], row["kept_reason"])
    return [str(note) for note in notes if note]


def _cells(row: State) -> tuple[str, ...]:
    compared = row["deletes"] == "compared"
    return (
        str(row["consumer"]),
        f"{row['table_schema']}.{row['table_name']}",
        str(row["state"]),
        str(row["rows_read"]),
        f"{row['rows']:,}",
        f"{row['deleted']:,}" if compared else "not found",
    )
