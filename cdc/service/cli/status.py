"""``walbrook status``: once, as JSON, or again and again with ``--watch``."""

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
    command_group,
    print_json,
    state_of,
)
from cdc.service.cli.row_listing import row_listing
from cdc.state.listings import Listing, health, listed

status_app = command_group()


@status_app.command()
def status(
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")
    ] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.2, max=60, help="Seconds between two looks.")
    ] = 1.0,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Show sources, consumers, cursors and lag."""
    with state_of(config) as state:
        _require_schema(state)
        if watch:
            _watch(state, every_s)
        elif as_json:
            print_json(
                {
                    "sources": listed(state, Listing.SOURCES),
                    "sinks": listed(state, Listing.SINKS),
                    "lag": listed(state, Listing.LAG),
                    "health": health(state),
                }
            )
        else:
            from rich.console import Console

            from cdc.service.cli.status_tables import status_tables

            Console().print(status_tables(state))


def _require_schema(state: Connection) -> None:
    row = state.execute("SELECT to_regclass('walbrook.consumers') IS NULL").fetchone()
    if row is not None and row[0]:
        raise OperatorError(
            "the state database holds no schema walbrook yet",
            fix="run walbrook migrate, or start the service",
        )


def _watch(state: Connection, every_s: float) -> None:
    """The tables with the rates of the last looks above them; Ctrl-C ends it well."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from cdc.service.cli.sparklines import RateHistory
    from cdc.service.cli.status_tables import status_tables

    rates = RateHistory()
    console = Console()
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                rates.note(
                    time.monotonic(), listed(state, Listing.SINKS), listed(state, Listing.LAG)
                )
                shown = row_listing(rates.HEADINGS, rates.rows(), None)
                live.update(Group(Text(shown), "", status_tables(state)), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return
