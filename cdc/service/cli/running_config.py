"""``walbrook config plan``, ``apply`` and ``export``: the configuration of the running service.

Thin layers over the functions of schema walbrook: the service reads the file that it was started
with, and what it refuses is what is printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    command_group,
    print_json,
    state_of,
)
from cdc.state.configurations import request_config, running_config
from cdc.state.operators import State

running_config_app = command_group()

_SHOWN: Final = ("id", "action", "state", "asked_by", "revision", "changes", "result")

Partly = Annotated[
    bool,
    typer.Option("--partly", help="Leave out what needs a restart of the service."),
]
Database = Annotated[
    str | None,
    typer.Option(help="A database of the service, where several share the state database."),
]
Wait = Annotated[
    float, typer.Option(min=1, max=600, help="How long to wait for the service, in seconds.")
]


@running_config_app.command()
def plan(
    config: ConfigPath = DEFAULT_CONFIG,
    database: Database = None,
    partly: Partly = False,
    as_json: AsJson = False,
    wait_s: Wait = 60.0,
) -> None:
    """Say what the file would change in the running service, and how each change takes effect."""
    _print(_asked(config, "plan", database, partly=partly, wait_s=wait_s), as_json=as_json)


@running_config_app.command()
def apply(
    config: ConfigPath = DEFAULT_CONFIG,
    database: Database = None,
    partly: Partly = False,
    as_json: AsJson = False,
    wait_s: Wait = 180.0,
) -> None:
    """Have the running service run the file as it is now; a wrong file changes nothing."""
    _print(_asked(config, "apply", database, partly=partly, wait_s=wait_s), as_json=as_json)


@running_config_app.command()
def export(config: ConfigPath = DEFAULT_CONFIG, database: Database = None) -> None:
    """Print the configuration as it runs, with variables as they are written and no secrets."""
    with state_of(config) as state:
        typer.echo(running_config(state, database), nl=False)


def _asked(
    config: Path, action: str, database: str | None, *, partly: bool, wait_s: float
) -> State:
    with state_of(config) as state:
        return request_config(state, action, source=database, partly=partly, wait_s=wait_s)


def _print(answer: State, *, as_json: bool) -> None:
    if as_json:
        print_json({name: answer[name] for name in _SHOWN})
        return
    typer.echo(answer["result"])
    if answer["revision"] is not None:
        typer.echo(f"revision {answer['revision']} runs")
