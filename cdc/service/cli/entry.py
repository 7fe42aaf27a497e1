"""The command ``walbrook``: a thin layer over the service and its SQL.

Errors of ours end a command with status 1 and one paragraph that says what to do; a traceback is a
bug.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import psycopg
import structlog
import typer
from rich.console import Console

from cdc.config import Config, load, show
from cdc.config.extras import check_extras
from cdc.errors import ConfigError, OperatorError, WalbrookError
from cdc.logs import configure_logs
from cdc.reach import reach
from cdc.service.checks.connections import check_connections
from cdc.service.checks.event_time import check_event_time
from cdc.service.checks.expressions import check_expressions
from cdc.service.checks.groups import check_groups
from cdc.service.cli.backfills import backfill_app
from cdc.service.cli.log import log_app
from cdc.service.cli.operators import operator_app
from cdc.service.cli.repairs import repair_app
from cdc.service.cli.status import status_tables
from cdc.service.cli.verify import verify_app
from cdc.service.http.server import HttpServer, listen
from cdc.service.process.java import require_java
from cdc.service.process.ownership import Ownership
from cdc.service.process.prepare import migrate_state, patiently, prepare_state, state_called
from cdc.service.process.repair import repair
from cdc.service.process.source_keeper import SourceKeeper, wait_for_sources
from cdc.service.process.supervisor import Supervisor
from cdc.stop import StopSignal

app = typer.Typer(
    name="walbrook",
    help="Streams every committed change of a Postgres database to the places that need it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check or print a configuration file.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(log_app, name="log")
app.add_typer(backfill_app, name="backfill")
app.add_typer(operator_app)
app.add_typer(repair_app)
app.add_typer(verify_app)

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", envvar="WALBROOK_CONFIG")
]
_DEFAULT = Path("walbrook.yaml")


@app.command()
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
) -> None:
    """Run the service until SIGTERM or Ctrl-C; what was read is delivered before it ends."""
    stop = StopSignal()
    stop.on_signals()
    require_java()
    if config is None and _DEFAULT.exists():
        config = _DEFAULT
    if config is None:
        from demo.open_shop import OpenShop

        with OpenShop() as example:
            raise typer.Exit(serve(example.config_path, stop))
    raise typer.Exit(serve(config, stop))


def serve(path: Path, stop: StopSignal) -> int:
    """Prepare the sources of a configuration and run its processes until ``stop``."""
    settings = load(path)
    check_extras(settings.sinks)
    configure_logs(settings.service)
    logger = structlog.get_logger("walbrook.start")
    # What does not fit the tables of a source concerns its sink alone, whose worker says so.
    for unchecked in check_event_time(settings, form_alone=True):
        logger.warning("config.unchecked", what=unchecked)
    with ExitStack() as held:
        ownership = patiently(lambda: held.enter_context(Ownership(settings)), stop)
        http = settings.service.http
        listener = held.enter_context(listen(http)) if http.enabled else None
        patiently(lambda: prepare_state(settings), stop)
        sources = {base.name: SourceKeeper(settings, base) for base in settings.databases}
        for keeper in sources.values():
            held.callback(keeper.close)
        wait_for_sources(sources.values(), stop)
        supervisor = Supervisor(settings, path.resolve(), sources)
        if listener is not None:
            held.enter_context(
                HttpServer(
                    http,
                    settings.state_dsn(),
                    supervisor,
                    sources=[*sources],
                    listener=listener,
                    started_at=time.monotonic(),
                    config=settings,
                    begin_repair=lambda name, deletes: repair(settings, name, deletes=deletes),
                )
            )
        return supervisor.run(stop, ownership.keep)


@app.command()
def status(config: ConfigPath = _DEFAULT) -> None:
    """Show sources, consumers, cursors and lag."""
    settings = load(config)
    with reach(settings.state_dsn(), state_called(settings)) as connection:
        try:
            tables = status_tables(connection)
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            raise OperatorError(
                "the state database holds no schema walbrook yet",
                fix="run walbrook migrate, or start the service",
            ) from None
    Console().print(tables)


@app.command()
def migrate(config: ConfigPath = _DEFAULT) -> None:
    """Bring the schema walbrook in the state database up to date."""
    applied = migrate_state(load(config))
    for migration in applied:
        typer.echo(f"applied {migration.number:04d} {migration.name}")
    if not applied:
        typer.echo("the schema walbrook is up to date")


@config_app.command("check")
def config_check(
    config: ConfigPath = _DEFAULT,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect",
            help="Try each database and destination as well; nothing is changed there.",
        ),
    ] = False,
    deadline_s: Annotated[
        float, typer.Option(min=1, max=600, help="How long each of them may take, with --connect.")
    ] = 10.0,
) -> None:
    """Read the file as the service would and say what is wrong with it, expressions included."""
    settings = load(config)
    check_extras(settings.sinks)
    checks: list[Callable[[], list[str]]] = [
        lambda: check_groups(settings),
        lambda: check_event_time(settings),
        lambda: check_expressions(settings, config),
    ]
    problems: list[ConfigError] = []
    for check in checks:
        try:
            for unchecked in check():
                typer.echo(f"not checked: {unchecked}")
        except ConfigError as error:
            problems.append(error)
    typer.echo(f"{config}: {'WRONG, see below' if problems else _summary(settings)}")
    found = check_connections(settings, config, deadline_s) if connect else []
    for each in found:
        typer.echo(f"{each.name}: {'' if each.ok else 'WRONG: '}{each.text}")
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    if not all(each.ok for each in found):
        raise typer.Exit(1)


@config_app.command("show")
def config_show(config: ConfigPath = _DEFAULT) -> None:
    """Print the configuration with defaults filled in and secrets as ***."""
    typer.echo(show(load(config)), nl=False)


def _summary(config: Config) -> str:
    databases, sinks = len(config.databases), len(config.sinks)
    return (
        f"correct: {databases} database{'' if databases == 1 else 's'}, "
        f"{sinks} sink{'' if sinks == 1 else 's'}"
    )


def main() -> None:
    """The entry point; turns our errors into a paragraph and status 1."""
    try:
        app()
    except WalbrookError as error:
        typer.echo(f"walbrook: {error}", err=True)
        raise SystemExit(1) from error
    except psycopg.OperationalError as error:
        typer.echo(f"walbrook: a database does not answer: {str(error).strip()}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
