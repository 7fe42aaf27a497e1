"""``walbrook verify``: start a comparison, show its progress, and say what was found.

A thin layer over the functions of schema walbrook: what they refuse is what is printed. Status 0:
everything is equal. Status 1: rows differ, or it is not known whether they do.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from cdc.connection import Connection
from cdc.errors import OperatorError
from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    Name,
    command_group,
    print_json,
    state_of,
)
from cdc.service.cli.row_listing import Row, print_rows
from cdc.state.operators import State
from cdc.state.verification_operators import (
    OPEN,
    cancel_verification,
    differences,
    is_equal,
    start_verification,
    verifications,
)

verify_app = command_group()

_LOOK_S = 0.5
_BARS_MAX = 20  # each look draws all of them
_HEADINGS = (
    "id", "table", "state", ">source", ">destination", ">missing", ">extra", ">different",
    ">changing", ">repaired",
)  # fmt: skip
_COUNTS = ("source_rows", "destination_rows", "missing", "extra", "different", "changing")


@verify_app.command()
def verify(
    consumer: Name,
    table: Annotated[
        str | None,
        typer.Argument(metavar="[TABLE]", help="As schema.table; all of its tables if not given."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Deliver the rows that differ again.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which it is cancelled.", min=1)
    ] = 86_400,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Compare what a destination holds with its source, while changes flow."""
    with state_of(config) as state:
        begun = start_verification(state, consumer, table, repair=repair)
        request = int(str(begun["request"]))
        try:
            rows = _watch(state, request, time.monotonic() + timeout)
        except KeyboardInterrupt:
            _cancel(state, request)
            raise typer.Exit(130) from None
    if as_json:
        print_json(rows)
    else:
        _show(rows)
    if not rows or not all(map(is_equal, rows)):
        raise typer.Exit(1)


@verify_app.command("cancel-verification")
def cancel(
    verification: Annotated[
        int, typer.Argument(metavar="ID", help="As walbrook.verifications shows it.")
    ],
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """End a verification."""
    with state_of(config) as state:
        row = cancel_verification(state, verification)
    if as_json:
        print_json(row)
    else:
        typer.echo(f"verification {verification} of {row['consumer']} is {row['state']}")


def _watch(state: Connection, request: int, deadline: float) -> list[State]:
    """Progress bars of the next tables, until all of them have ended."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("parts,"),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as bar:
        tasks = {}
        while True:
            rows = verifications(state, request=request)[::-1]
            under_way = [row for row in rows if row["state"] in OPEN]
            for row in under_way[:_BARS_MAX]:
                name, number = _name(row), int(str(row["id"]))
                if number not in tasks:
                    tasks[number] = bar.add_task(name, total=None, note="")
                total = float(str(row["parts"])) if row["parts"] is not None else None
                bar.update(
                    tasks[number],
                    total=total,
                    completed=float(str(row["parts_done"])),
                    note=str(row["reason"] or row["state"]),
                )
            for number in tasks.keys() - {int(str(row["id"])) for row in under_way}:
                bar.remove_task(tasks.pop(number))
            if not under_way:
                return rows
            if time.monotonic() > deadline:
                _cancel(state, request)
                raise OperatorError(
                    f"verification {request} took longer than the timeout, and was cancelled",
                    fix="see that the service runs (walbrook status), or raise --timeout",
                    kind="timeout",
                )
            time.sleep(_LOOK_S)


def _cancel(state: Connection, request: int) -> None:
    for row in verifications(state, request=request):
        if row["state"] in OPEN:
            cancel_verification(state, int(str(row["id"])))


def _show(rows: list[State]) -> None:
    print_rows(_HEADINGS, [Row(_cells(row), [str(row["error"] or "")]) for row in rows])
    if any(differences(row) for row in rows):
        typer.echo("the keys of rows that differ are in walbrook.verification_keys")
    if any(row["changing"] for row in rows):
        typer.echo("nothing is known of rows that are changing all the time: verify again later")


def _cells(row: State) -> tuple[str, ...]:
    numbers = (row[name] for name in (*_COUNTS, "repaired"))
    return (
        str(row["id"]),
        _name(row),
        str(row["state"]),
        *("" if number is None else f"{number:,}" for number in numbers),
    )


def _name(row: State) -> str:
    if row["table_name"] is None:
        return "all tables"
    return f"{row['table_schema']}.{row['table_name']}"
