"""``walbrook config check``, ``show``, ``plan``, ``apply`` and ``export``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.errors import ConfigError
from cdc.service.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, command_group, print_json
from cdc.service.cli.running_config import running_config_app

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.probing import ProbeResult

config_app = command_group("Check, print or apply a configuration file.")
config_app.add_typer(running_config_app)

_UNTRIED = (
    "databases, publications and tables, destinations, the log's directory, the HTTP port: "
    "--connect tries them"
)


@config_app.command("check")
def config_check(
    config: ConfigPath = DEFAULT_CONFIG,
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
    as_json: AsJson = False,
) -> None:
    """Read the file as the service would and say what is wrong with it, expressions included."""
    from cdc.config import load

    settings = load(config)
    unchecked = [] if connect else [_UNTRIED]
    problems: list[ConfigError] = []
    for check in _checks(settings, config):
        try:
            unchecked += check()
        except ConfigError as error:
            problems.append(error)
    tried = _connections(settings, config, deadline_s) if connect else []
    correct = not problems and all(each.ok for each in tried)
    if as_json:
        print_json(
            {
                "correct": correct,
                "problems": [str(problem) for problem in problems],
                "not_checked": unchecked,
                "tried": [{"name": e.name, "ok": e.ok, "text": e.text} for e in tried],
            }
        )
        raise typer.Exit(0 if correct else 1)
    for each in unchecked:
        typer.echo(f"not checked: {each}")
    typer.echo(f"{config}: {'WRONG, see below' if problems else _summary(settings)}")
    for result in tried:
        typer.echo(f"{result.name}: {'' if result.ok else 'WRONG: '}{result.text}")
    if problems:
        raise ConfigError("\n".join(map(str, problems)))
    if not correct:
        raise typer.Exit(1)


@config_app.command("show")
def config_show(config: ConfigPath = DEFAULT_CONFIG) -> None:
    """Print the configuration with defaults filled in and secrets as ***."""
    from cdc.config import load, show

    typer.echo(show(load(config)), nl=False)


def _checks(settings: Config, path: Path) -> Iterator[Callable[[], list[str]]]:
    """All checks are made, whatever one finds; what a file does not use is not imported."""

    def packages() -> list[str]:
        from cdc.config.extras import check_extras

        check_extras(settings.sinks)
        return []

    def groups() -> list[str]:
        from cdc.service.checks.groups import check_groups

        return check_groups(settings)

    def event_times() -> list[str]:
        from cdc.service.checks.event_time import check_event_time

        return check_event_time(settings)

    def expressions() -> list[str]:
        from cdc.service.checks.expressions import check_expressions

        return check_expressions(settings, path)

    yield packages
    if any(sink.tables for sink in settings.sinks):
        yield groups
    if any(sink.event_time is not None for sink in settings.sinks):
        yield event_times
    yield expressions


def _connections(settings: Config, path: Path, deadline_s: float) -> list[ProbeResult]:
    from cdc.service.checks.connections import check_connections

    return check_connections(settings, path, deadline_s)


def _summary(config: Config) -> str:
    databases, sinks = len(config.databases), len(config.sinks)
    return (
        f"correct: {databases} database{'' if databases == 1 else 's'}, "
        f"{sinks} sink{'' if sinks == 1 else 's'}"
    )
