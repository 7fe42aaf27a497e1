"""``walbrook log ls | verify | cat``: looking into the change log.

They read the log's directory and what it names, nothing else: no database, no lock, and the
service may run meanwhile. None of them writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import closing
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cursor import ORIGIN, Cursor, parse_lsn
from cdc.errors import OperatorError
from cdc.service.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    command_group,
    print_json,
)

if TYPE_CHECKING:
    from rich.progress import Progress

log_app = command_group("Look into the change log of a source.")

Source = Annotated[
    str | None,
    typer.Option("--source", "-s", help="The database whose log it is, if there are several."),
]
_PIPED_WIDTH = 200


class Action(StrEnum):
    """What a change does."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"
    TRUNCATE = "truncate"
    MESSAGE = "message"
    SCHEMA_CHANGE = "schema_change"


@log_app.command("ls")
def log_ls(
    config: ConfigPath = DEFAULT_CONFIG,
    source: Source = None,
    as_json: AsJson = False,
) -> None:
    """Show floors, ends and segments, the active segment last."""
    from rich.console import Console

    from cdc.service.cli.log_listing import describe_log, show_log

    name, directory = find_log(config, source)
    described = describe_log(name, directory)
    if as_json:
        print_json(described)
    else:
        show_log(described, Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH))


@log_app.command("verify")
def log_verify(
    config: ConfigPath = DEFAULT_CONFIG,
    source: Source = None,
    hot_only: Annotated[
        bool, typer.Option("--hot-only", help="Leave out the segments in the second tier.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything and check it against its checksums; status 1 if anything is damaged."""
    from cdc.log.recovery.verify import LogVerification

    name, directory = find_log(config, source)
    verification = LogVerification(directory, hot_only=hot_only)
    damages: list[str] = []
    with _progress() as progress:
        task = progress.add_task(name, total=verification.bytes_total)
        for damage in verification.run(lambda done: progress.update(task, completed=done)):
            damages.append(str(damage))
            if not as_json:
                # Standard output, so that a report can be kept; the bar is on standard error.
                typer.echo(damages[-1])
    if as_json:
        summary = verification.summary()
        print_json({"source": name, "summary": summary, "damages": damages})
    else:
        typer.echo(
            f"{name}: {verification.summary()}, {_counted(len(damages), 'damage')}",
            err=bool(damages),
        )
    if damages:
        raise typer.Exit(1)


@log_app.command("cat")
def log_cat(
    config: ConfigPath = DEFAULT_CONFIG,
    source: Source = None,
    start: Annotated[
        str,
        typer.Option(
            "--from", help="First cursor to print: LSN:index, an LSN alone, or 'earliest'."
        ),
    ] = "earliest",
    end: Annotated[
        str | None, typer.Option("--to", help="Cursor to stop before: LSN:index or an LSN.")
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", "-t", help="Only this table, as schema.table; repeatable."),
    ] = None,
    action: Annotated[
        list[Action] | None, typer.Option("--action", "-a", help="Only this action; repeatable.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many changes.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more at the end, until Ctrl-C.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print messages as they came, not decoded.")
    ] = False,
) -> None:
    """Print changes as lines of JSON; status 1 if a batch could not be read."""
    from cdc.log.manifest import read_manifest
    from cdc.log.view import LogView
    from cdc.service.cli.log_changes import ChangePrinter, Choice
    from cdc.service.cli.log_listing import no_manifest

    _name, directory = find_log(config, source)
    choice = Choice(
        ORIGIN if start == "earliest" else read_cursor(start),
        None if end is None else read_cursor(end),
        frozenset(_qualified(name) for name in table or ()),
        frozenset(action or ()),
    )
    if read_manifest(directory) is None:
        raise no_manifest(directory)
    with closing(LogView(directory)) as log:
        earliest, _evicted = log.floors()
        if ORIGIN < choice.start < earliest:
            _complain(f"changes below {earliest} are no longer in the log; printing starts there")
        printer = ChangePrinter(log, choice, _complain, raw=raw)
        try:
            _write(printer.lines(follow=follow), limit, at_once=follow)
        except KeyboardInterrupt:
            pass
        except BrokenPipeError:
            # The reader of the output has enough. Python would flush once more at exit, and
            # complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if printer.damaged:
        raise typer.Exit(1)


def find_log(config: Path, source: str | None) -> tuple[str, Path]:
    """The source's name and its log's directory; one that holds no log is refused."""
    from cdc.config import load

    settings = load(config)
    names = [database.name for database in settings.databases]
    if source is None and len(names) > 1:
        raise OperatorError(
            f"{config} has several databases",
            fix=f"choose a log with --source, one of {', '.join(names)}",
        )
    name = settings.database(source or names[0]).name
    directory = settings.log.directory / name
    if not directory.is_dir():
        raise OperatorError(
            f"there is no log in {directory}",
            fix="start the service, which makes it, or correct log.directory",
        )
    return name, directory


def read_cursor(text: str) -> Cursor:
    """A cursor, or an LSN for the first change at it."""
    return Cursor.parse(text) if ":" in text else Cursor(parse_lsn(text), 0)


def _qualified(name: str) -> str:
    if "." not in name:
        raise OperatorError(
            f"'{name}' names no schema", fix=f"write it as schema.table, such as public.{name}"
        )
    return name


def _write(lines: Iterable[bytes], limit: int | None, *, at_once: bool) -> None:
    out = sys.stdout.buffer
    for line in islice(lines, limit):
        out.write(line)
        if at_once:
            out.flush()
    out.flush()


def _complain(text: str) -> None:
    typer.echo(f"walbrook: {text}", err=True)


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        # Lines that go elsewhere must not be drawn into the bar's terminal.
        redirect_stdout=sys.stdout.isatty(),
    )
