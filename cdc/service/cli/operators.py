"""``walbrook pause``, ``resume``, ``rewind``, ``skip-to``, ``discard-all``, ``redeliver`` and more;
for event time ``advance-watermark`` and ``set-partition-idle``.

Thin layers over the functions of schema walbrook: what they refuse is what is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cdc.config import load
from cdc.connection import Connection
from cdc.reach import reach
from cdc.service.cli.row_listing import Row, print_rows
from cdc.service.cli.trace import trace_app
from cdc.service.process.prepare import state_called
from cdc.state import operators
from cdc.state.operators import State

operator_app = typer.Typer()
operator_app.add_typer(trace_app)

Name = Annotated[
    str,
    typer.Argument(metavar="CONSUMER", help="The sink's name; database/sink if it reads several."),
]
ConfigPath = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file.", envvar="WALBROOK_CONFIG")
]
Letter = Annotated[int | None, typer.Option("--id", help="Only the dead letter with this id.")]
_DEFAULT = Path("walbrook.yaml")
_LETTER_HEADINGS = ("id", "consumer", "cursor", "table", "action", "kind", ">tried")


@operator_app.command()
def pause(consumer: Name, config: ConfigPath = _DEFAULT) -> None:
    """Deliver nothing more to a consumer until it is resumed; it keeps its cursor."""
    with state_of(config) as state:
        _tell(consumer, operators.pause(state, consumer))


@operator_app.command()
def resume(consumer: Name, config: ConfigPath = _DEFAULT) -> None:
    """Serve a paused consumer again, from its cursor on; try one that failed at once."""
    with state_of(config) as state:
        _tell(consumer, operators.resume(state, consumer))


@operator_app.command()
def accept_loss(consumer: Name, config: ConfigPath = _DEFAULT) -> None:
    """Take note that a consumer's destination lost messages that it had."""
    with state_of(config) as state:
        _tell(consumer, operators.accept_loss(state, consumer))


@operator_app.command()
def rewind(
    consumer: Name,
    to_cursor: Annotated[
        str | None, typer.Option(help="The first change to deliver again: LSN:index.")
    ] = None,
    to_time: Annotated[
        str | None, typer.Option(help="To the start of the log segment that holds this time.")
    ] = None,
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="To the first change that the log has.")
    ] = False,
    destination: Annotated[
        str | None,
        typer.Option(
            help="What becomes of what a destination holds that keeps a position of its own (file, "
            "parquet, redis_stream, exactly-once kafka): new_generation (it stays, a new place "
            "beside it begins) or truncate (it is removed; not for kafka)."
        ),
    ] = None,
    config: ConfigPath = _DEFAULT,
) -> None:
    """Deliver everything again from an earlier place on."""
    with state_of(config) as state:
        _tell(
            consumer,
            operators.rewind(
                state,
                consumer,
                to_cursor=to_cursor,
                to_time=to_time,
                to_earliest=to_earliest,
                destination=destination,
            ),
            "removed from its queue, because they come again",
            says_none=False,
        )


@operator_app.command("skip-to")
def skip_to(
    consumer: Name,
    cursor: Annotated[
        str, typer.Argument(metavar="CURSOR", help="The first change to deliver: LSN:index.")
    ],
    config: ConfigPath = _DEFAULT,
) -> None:
    """Move a consumer forward in the log and give up what lies before; its sink gets a gap
    message."""
    with state_of(config) as state:
        _tell(consumer, operators.skip_to(state, consumer, cursor))


@operator_app.command("advance-watermark")
def advance_watermark(
    consumer: Name,
    to_time: Annotated[str, typer.Argument(metavar="TIME", help="The least it is to be.")],
    source: Annotated[
        str | None, typer.Option(help="Only for the tables of this database.")
    ] = None,
    config: ConfigPath = _DEFAULT,
) -> None:
    """Wait for nothing at or below a time any more, in event-time order."""
    with state_of(config) as state:
        done = operators.advance_watermark(state, consumer, to_time, source)
        typer.echo(f"the watermark of {consumer} is at least {done['watermark']} from now on")


@operator_app.command("set-partition-idle")
def set_partition_idle(
    consumer: Name,
    partition: Annotated[
        str, typer.Argument(metavar="TABLE", help="As walbrook.watermarks names it: schema.table.")
    ],
    active: Annotated[
        bool, typer.Option("--active", help="Take the mark back: it counts again.")
    ] = False,
    config: ConfigPath = _DEFAULT,
) -> None:
    """Let a table hold the watermark back no more, in event-time order."""
    with state_of(config) as state:
        operators.set_partition_idle(state, consumer, partition, idle=not active)
        typer.echo(f"{partition} of {consumer} is marked {'active' if active else 'idle'}")


@operator_app.command("discard-all")
def discard_all(consumer: Name, config: ConfigPath = _DEFAULT) -> None:
    """Give up all that a consumer has not had; its sink gets a gap message."""
    with state_of(config) as state:
        _tell(consumer, operators.discard_all(state, consumer), "removed from its queue")


@operator_app.command()
def redeliver(consumer: Name, letter: Letter = None, config: ConfigPath = _DEFAULT) -> None:
    """Send dead letters again: one, or all that can be."""
    with state_of(config) as state:
        _tell(consumer, operators.redeliver(state, consumer, letter), "put back into its queue")


@operator_app.command()
def discard(
    consumer: Name,
    letter: Letter = None,
    cursor: Annotated[
        str | None,
        typer.Option(help="Give up the message that waits in its queue at this cursor."),
    ] = None,
    config: ConfigPath = _DEFAULT,
) -> None:
    """Acknowledge dead letters, one or all, or give up one message that waits."""
    with state_of(config) as state:
        _tell(consumer, operators.discard(state, consumer, letter, cursor), "discarded")


@operator_app.command("dead-letters")
def dead_letters(
    consumer: Annotated[
        str | None, typer.Argument(metavar="[CONSUMER]", help="Of this sink alone.")
    ] = None,
    config: ConfigPath = _DEFAULT,
) -> None:
    """List the changes that consumers went on without."""
    with state_of(config) as state:
        found = operators.dead_letters(state, consumer)
    if not found:
        typer.echo("no dead letters")
        return
    rows = []
    for row in found:
        where = f"{row['table_schema']}.{row['table_name']}"
        cells = (row["id"], row["called"], row["cursor"], where, row["action"], row["kind"],
                 row["deliveries"])  # fmt: skip
        rows.append(Row([str(cell) for cell in cells], [str(row["error"])]))
    print_rows(_LETTER_HEADINGS, rows)
    if len(found) == operators.LETTERS_MAX:
        typer.echo(f"these are the first {operators.LETTERS_MAX:,}")


@contextmanager
def state_of(config: Path) -> Iterator[Connection]:
    """The state database of a configuration, with what it warns of on stderr."""
    settings = load(config)
    with reach(settings.state_dsn(), state_called(settings)) as connection:
        # Some of what is asked for was done, and the rest was not.
        connection.add_notice_handler(
            lambda notice: typer.echo(f"warning: {notice.message_primary}", err=True)
        )
        yield connection


def _tell(consumer: str, state: State, what: str = "", *, says_none: bool = True) -> None:
    """The consumer's new state in one or two lines, under the name it was given.

    The first counts the messages to which something was done; without ``says_none`` only if any.
    """
    count = state["affected"]
    if what and (count or says_none):
        typer.echo(f"{count} message{'' if count == 1 else 's'} {what}")
    paused = f", paused since {state['paused_at']:%Y-%m-%d %H:%M:%S}" if state["paused_at"] else ""
    generation = f" of generation {state['generation']}" if state["generation"] != 1 else ""
    typer.echo(
        f"{consumer} stands at {state['cursor']}{generation}{paused}; "
        f"{_counted(state['waiting'])} in its queue, {_counted(state['dead_letters'])} dead letters"
    )


def _counted(count: object) -> str:
    return f"{count} or more" if count == operators.COUNTED_MAX else str(count)
