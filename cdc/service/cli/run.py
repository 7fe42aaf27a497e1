"""``walbrook run`` and ``walbrook migrate``: the service itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    command_group,
    print_json,
    state_of,
)

run_app = command_group()


@run_app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="The configuration file; if not given, walbrook.yaml; if that is not there "
            "either, an embedded example runs.",
            envvar="WALBROOK_CONFIG",
        ),
    ] = None,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Wait until no other service serves these databases, then take over.",
        ),
    ] = False,
) -> None:
    """Run the service until SIGTERM or Ctrl-C; what was read is delivered before it ends."""
    from cdc.service.process.java import require_java
    from cdc.service.serve import serve
    from cdc.stop import StopSignal

    stop = StopSignal()
    stop.on_signals()
    require_java()
    if config is None and DEFAULT_CONFIG.exists():
        config = DEFAULT_CONFIG
    if config is None:
        from demo.open_shop import OpenShop

        with OpenShop() as example:
            raise typer.Exit(serve(example.config_path, stop))
    raise typer.Exit(serve(config, stop, standby=standby))


@run_app.command()
def migrate(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Bring the schema walbrook in the state database up to date."""
    from cdc.state.migrate import migrate as apply_missing

    with state_of(config) as state:
        applied = apply_missing(state)
    if as_json:
        print_json([{"number": each.number, "name": each.name} for each in applied])
        return
    for migration in applied:
        typer.echo(f"applied {migration.number:04d} {migration.name}")
    if not applied:
        typer.echo("the schema walbrook is up to date")
