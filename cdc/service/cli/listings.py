"""``walbrook sources``, ``sinks``, ``lag``, ``queue`` and ``audit``: what SQL says, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    OptionalName,
    command_group,
    print_json,
    state_of,
)
from cdc.service.cli.row_listing import Row, print_rows, size_text
from cdc.state.listings import LISTED_MAX, Listing, listed
from cdc.state.operators import State

listing_app = command_group()

Limit = Annotated[int, typer.Option(min=1, max=LISTED_MAX, help="At most so many rows.")]


@listing_app.command()
def sources(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """List the databases: their readers, slots and logs."""
    headings = ("source", "state", "slot", "restart cursor", ">lag", ">lag s", ">log", "wal")
    _list(config, Listing.SOURCES, headings, _source, as_json=as_json)


@listing_app.command()
def sinks(
    consumer: OptionalName = None, config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False
) -> None:
    """List the sinks: what each does, and where it stands."""
    headings = ("source", "sink", "type", "state", "cursor", ">delivered", ">absorbed", ">dead")
    _list(config, Listing.SINKS, headings, _sink, named=consumer, as_json=as_json)


@listing_app.command()
def lag(
    consumer: OptionalName = None, config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False
) -> None:
    """List how far sources and sinks are behind, the furthest first."""
    headings = ("source", "sink", "cursor", ">lag", ">lag s", "moved")
    _list(config, Listing.LAG, headings, _behind, named=consumer, as_json=as_json)


@listing_app.command()
def queue(
    consumer: OptionalName = None,
    limit: Limit = 100,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """List messages that wait: refused ones and those behind them, and those to be fetched."""
    headings = ("sink", "cursor", "table", "action", ">tried", "due", "held by", "until")
    _list(config, Listing.QUEUE, headings, _waiting, named=consumer, most=limit, as_json=as_json)


@listing_app.command()
def audit(
    action: Annotated[
        str | None, typer.Argument(metavar="[ACTION]", help="Of this action alone.")
    ] = None,
    limit: Limit = 100,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """List what operators did, the latest first."""
    headings = ("at", "by", "over", "role", "action", "arguments", "result")
    _list(config, Listing.AUDIT, headings, _act, named=action, most=limit, as_json=as_json)


def _list(
    config: ConfigPath,
    listing: Listing,
    headings: Sequence[str],
    row_of: Callable[[State], Row],
    *,
    named: str | None = None,
    most: int = LISTED_MAX,
    as_json: bool,
) -> None:
    with state_of(config) as state:
        found = listed(state, listing, named, most)
    if as_json:
        print_json(found)
    elif not found:
        typer.echo("none")
    else:
        print_rows(headings, [row_of(row) for row in found])


def _source(row: State) -> Row:
    cells = (
        row["source"], row["state"], row["slot"], row["cursor"], _size(row["lag_bytes"]),
        _seconds(row["lag_seconds"]), _size(row["log_bytes"]), row["slot_wal_status"],
    )  # fmt: skip
    return Row(_texts(cells), [_text(row["last_error"])])


def _sink(row: State) -> Row:
    state = "paused" if row["paused_at"] else row["state"] if row["active"] else "not active"
    cells = (
        row["source"], row["consumer"], row["destination"], state, row["cursor"],
        f"{row['delivered']:,}", f"{row['absorbed']:,}", f"{row['dead']:,}",
    )  # fmt: skip
    return Row(_texts(cells), [_text(row["last_error"] or row["state_reason"])])


def _behind(row: State) -> Row:
    cells = (
        row["source"], row["consumer"] or "(restart cursor)", row["cursor"],
        _size(row["lag_bytes"]), _seconds(row["lag_seconds"]), _time(row["moved_at"]),
    )  # fmt: skip
    return Row(_texts(cells))


def _waiting(row: State) -> Row:
    table = f"{row['table_schema']}.{row['table_name']}"
    cells = (
        row["consumer"], row["cursor"], table, row["action"], row["deliveries"],
        _time(row["due_at"]), row["holder"], _time(row["lease_until"]),
    )  # fmt: skip
    return Row(_texts(cells))


def _act(row: State) -> Row:
    arguments = row["arguments"]
    named = (
        ", ".join(f"{key}: {value}" for key, value in arguments.items())
        if isinstance(arguments, dict)
        else ""
    )
    cells = (
        _time(row["at"]), row["actor"], row["channel"], row["database_role"], row["action"],
        named, row["result"],
    )  # fmt: skip
    return Row(_texts(cells))


def _texts(cells: Sequence[object]) -> list[str]:
    return [_text(cell) for cell in cells]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _time(value: object) -> str:
    return "" if value is None else f"{value:%Y-%m-%d %H:%M:%S}"


def _seconds(value: object) -> str:
    return "" if value is None else f"{float(str(value)):,.1f}"


def _size(value: object) -> str:
    return size_text(None if value is None else int(str(value)))
