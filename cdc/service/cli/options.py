"""What the commands have in common: their options, and how a group of them is made."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cdc.errors import OperatorError

if TYPE_CHECKING:
    from cdc.connection import Connection

DEFAULT_CONFIG: Final = Path("walbrook.yaml")

ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", envvar="WALBROOK_CONFIG")
]


def _sink_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The sinks of the configuration, for completion; a file that cannot be read has none."""
    import yaml

    path = ctx.params.get("config") or os.environ.get("WALBROOK_CONFIG") or DEFAULT_CONFIG
    try:
        sinks = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["sinks"]
        names = [str(sink["name"]) for sink in sinks]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return []
    return [name for name in names if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="CONSUMER",
        help="The sink's name; database/sink if it reads several.",
        autocompletion=_sink_names,
    ),
]
OptionalName = Annotated[
    str | None,
    typer.Argument(metavar="[CONSUMER]", help="Of this sink alone.", autocompletion=_sink_names),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]
Confirmed = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]


def command_group(about: str | None = None) -> typer.Typer:
    """Commands whose help is plain text, as fast to print as to pipe."""
    return typer.Typer(
        help=about,
        no_args_is_help=about is not None,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


@contextmanager
def state_of(config: Path) -> Iterator[Connection]:
    """The state database of a configuration, with what it warns of on stderr."""
    from cdc.config import load
    from cdc.reach import reach
    from cdc.state.audit import identify

    settings = load(config)
    act_as_user()
    with reach(settings.state_dsn(), settings.state_called()) as connection:
        # Some of what is asked for was done, and the rest was not.
        connection.add_notice_handler(
            lambda notice: typer.echo(f"warning: {notice.message_primary}", err=True)
        )
        identify(connection)
        yield connection


def act_as_user() -> None:
    """Let walbrook.audit name the user of this command."""
    from cdc.state.audit import ACTOR, Actor, Channel

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for its user
        user = f"uid {os.getuid()}"
    ACTOR.set(Actor(Channel.COMMAND_LINE, user))


def print_json(value: Mapping[str, object] | Sequence[object]) -> None:
    """One JSON document; a list is the member ``data``, as over HTTP."""
    import orjson

    content = value if isinstance(value, Mapping) else {"data": value}
    typer.echo(orjson.dumps(content, default=str, option=orjson.OPT_INDENT_2).decode())


def confirm(question: str, *, confirmed: bool) -> None:
    """Ask before what cannot be taken back; without a terminal, ``--yes`` is needed."""
    if confirmed:
        return
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # the input has ended
        agreed = False
    if not agreed:
        raise OperatorError("it was not confirmed, and nothing was done", fix="add --yes")
