"""``walbrook backfill start``, ``pause``, ``resume``, ``cancel``, ``retry``, ``skip``, ``status``.

Thin layers over the functions of schema walbrook: what they refuse is what is printed.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from cdc.connection import Connection
from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    Confirmed,
    Name,
    OptionalName,
    command_group,
    confirm,
    print_json,
    state_of,
)
from cdc.service.cli.row_listing import Row, print_rows
from cdc.state.backfill_operators import Act, backfills, change_backfill, start_backfill
from cdc.state.operators import State

backfill_app = command_group("Deliver rows that exist already to a consumer.")

_LOOK_S = 0.5
_HEADINGS = ("id", "consumer", "table", "state", ">done", ">rows", ">rows/s", ">left")
_OPEN = ("waiting", "running", "paused")

Id = Annotated[int, typer.Argument(metavar="ID", help="As walbrook backfill status shows it.")]


@backfill_app.command()
def start(
    consumer: Name,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="As schema.table.")],
    where: Annotated[
        str | None, typer.Option(help="Only rows for which this SQL expression is true.")
    ] = None,
    sort_column: Annotated[
        str | None, typer.Option(help="Read rows in the order of this column.")
    ] = None,
    start_position: Annotated[
        str | None, typer.Option(help="Only rows from this value of the sort column on.")
    ] = None,
    chunk_bytes: Annotated[
        int | None, typer.Option(help="About how much of the table is read at once.")
    ] = None,
    rows_per_second: Annotated[
        int | None, typer.Option(help="Most rows delivered per second.")
    ] = None,
    connections: Annotated[int | None, typer.Option(help="Most chunks read at once.")] = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload", help="Load the table afresh beside the old one, then swap them at once."
        ),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the progress until it has ended.")
    ] = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Deliver the existing rows of a table, among the changes."""
    from cdc.config import load
    from cdc.service.backfill_check import require_table

    require_table(load(config), consumer, table)
    with state_of(config) as state:
        begun = start_backfill(
            state,
            consumer,
            table,
            where=where,
            sort_column=sort_column,
            start_position=start_position,
            chunk_bytes=chunk_bytes,
            rows_per_second=rows_per_second,
            connections=connections,
            reload=reload,
        )
        _tell(begun, as_json=as_json)
        if wait:
            watch(state, int(str(begun["id"])))


def _command(act: Act, help_text: str) -> None:
    @backfill_app.command(act, help=help_text)
    def run(backfill: Id, config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
        with state_of(config) as state:
            _tell(change_backfill(state, act, backfill), as_json=as_json)


def _final_command(act: Act, help_text: str) -> None:
    @backfill_app.command(act, help=help_text)
    def run(
        backfill: Id,
        confirmed: Confirmed = False,
        config: ConfigPath = DEFAULT_CONFIG,
        as_json: AsJson = False,
    ) -> None:
        confirm(f"{act} backfill {backfill} for good?", confirmed=confirmed)
        with state_of(config) as state:
            _tell(change_backfill(state, act, backfill), as_json=as_json)


_command("pause", "Read and deliver nothing more of a backfill until it is resumed.")
_command("resume", "Go on with a paused backfill.")
_command("cancel", "End a backfill; what was delivered stays.")
_command("retry", "Go on with a failed backfill.")
_final_command("skip", "Go on without the rest of a failed backfill.")


@backfill_app.command()
def status(
    consumer: OptionalName = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Show backfills: how far they are, how fast, and what they wait for."""
    with state_of(config) as state:
        found = backfills(state, consumer)
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("no backfills")
        return
    print_rows(_HEADINGS, [Row(_cells(row), [_note(row)]) for row in found])


def _cells(row: State) -> tuple[str, ...]:
    rate, left = row["rows_per_second"], row["seconds_left"]
    return (
        str(row["id"]),
        str(row["consumer"]),
        f"{row['table_schema']}.{row['table_name']}",
        f"{row['state']} (reload)" if row["reload"] else str(row["state"]),
        f"{float(str(row['fraction'])):.0%}",
        f"{row['rows']:,}",
        "" if rate is None else f"{float(str(rate)):,.0f}",
        "" if left is None else f"{float(str(left)):,.0f} s",
    )


def _note(row: State) -> str:
    return str(row["error"] or row["reason"] or "")


def watch(state: Connection, request: int) -> None:
    """A progress bar over chunks, until the backfill has ended or needs an operator.

    One of a table whose partitions are published is as many backfills as there are partitions.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("chunks,"),
        TextColumn("{task.fields[rows]:,} rows"), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns) as bar:
        task = bar.add_task(f"backfill {request}", total=None, rows=0, note="")
        while True:
            found = backfills(state, request=request)[::-1]
            bar.update(
                task,
                total=_sum(found, "chunks") or None,
                completed=_sum(found, "chunks_done"),
                rows=_sum(found, "rows"),
                note=next(filter(None, map(_note, found)), ""),
            )
            if all(row["state"] not in _OPEN for row in found):
                break
            time.sleep(_LOOK_S)
    for row in found:
        typer.echo(f"backfill {row['id']} is {row['state']}")
    failed = [row for row in found if row["state"] == "failed"]
    for row in failed:
        typer.echo(f"error: {_note(row)}", err=True)
    if failed:
        raise typer.Exit(1)


def _sum(found: list[State], name: str) -> int:
    return sum(int(str(row[name])) for row in found)


def _tell(row: State, *, as_json: bool) -> None:
    if as_json:
        print_json(row)
        return
    table = f"{row['table_schema']}.{row['table_name']}"
    kind = "reload" if row["reload"] else "backfill"
    typer.echo(f"{kind} {row['id']} of {table} into {row['consumer']} is {row['state']}")
