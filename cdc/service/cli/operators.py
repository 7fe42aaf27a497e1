"""``walbrook pause``, ``resume``, ``rewind``, ``skip-to``, ``discard-all``, ``redeliver`` and more;
for event time ``advance-watermark`` and ``set-partition-idle``.

Thin layers over the functions of schema walbrook: what they refuse is what is printed.
"""

from __future__ import annotations

from typing import Annotated

import typer

from cdc.errors import OperatorError
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
from cdc.state import operators
from cdc.state.operators import State

operator_app = command_group()

Letter = Annotated[int | None, typer.Option("--id", help="Only the dead letter with this id.")]
_LETTER_HEADINGS = ("id", "consumer", "cursor", "table", "action", "kind", ">tried")


@operator_app.command()
def pause(consumer: Name, config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Deliver nothing more to a consumer until it is resumed; it keeps its cursor."""
    with state_of(config) as state:
        _tell(consumer, operators.pause(state, consumer), as_json=as_json)


@operator_app.command()
def resume(consumer: Name, config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Serve a paused consumer again, from its cursor on; try one that failed at once."""
    with state_of(config) as state:
        _tell(consumer, operators.resume(state, consumer), as_json=as_json)


@operator_app.command()
def accept_loss(
    consumer: Name, config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False
) -> None:
    """Take note that a consumer's destination lost messages that it had."""
    with state_of(config) as state:
        _tell(consumer, operators.accept_loss(state, consumer), as_json=as_json)


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
    confirmed: Confirmed = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Deliver everything again from an earlier place on."""
    if destination == "truncate":
        confirm(f"remove what the destination of {consumer} holds?", confirmed=confirmed)
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
            as_json=as_json,
        )


@operator_app.command("skip-to")
def skip_to(
    consumer: Name,
    cursor: Annotated[
        str, typer.Argument(metavar="CURSOR", help="The first change to deliver: LSN:index.")
    ],
    confirmed: Confirmed = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Move a consumer forward in the log and give up what lies before; its sink gets a gap
    message."""
    confirm(f"give up what {consumer} has not had below {cursor}?", confirmed=confirmed)
    with state_of(config) as state:
        _tell(consumer, operators.skip_to(state, consumer, cursor), as_json=as_json)


@operator_app.command("advance-watermark")
def advance_watermark(
    consumer: Name,
    to_time: Annotated[str, typer.Argument(metavar="TIME", help="The least it is to be.")],
    source: Annotated[
        str | None, typer.Option(help="Only for the tables of this database.")
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Wait for nothing at or below a time any more, in event-time order."""
    with state_of(config) as state:
        done = operators.advance_watermark(state, consumer, to_time, source)
    if as_json:
        print_json(done)
    else:
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
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Let a table hold the watermark back no more, in event-time order."""
    with state_of(config) as state:
        done = operators.set_partition_idle(state, consumer, partition, idle=not active)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{partition} of {consumer} is marked {'active' if active else 'idle'}")


@operator_app.command("discard-all")
def discard_all(
    consumer: Name,
    confirmed: Confirmed = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Give up all that a consumer has not had; its sink gets a gap message."""
    confirm(f"give up all that {consumer} has not had?", confirmed=confirmed)
    with state_of(config) as state:
        done = operators.discard_all(state, consumer)
    _tell(consumer, done, "removed from its queue", as_json=as_json)


@operator_app.command()
def redeliver(
    consumer: Name,
    letter: Letter = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Send dead letters again: one, or all that can be."""
    with state_of(config) as state:
        done = operators.redeliver(state, consumer, letter)
    _tell(consumer, done, "put back into its queue", as_json=as_json)


@operator_app.command()
def discard(
    consumer: Name,
    letter: Letter = None,
    cursor: Annotated[
        str | None,
        typer.Option(help="Give up the message that waits in its queue at this cursor."),
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Acknowledge dead letters, one or all, or give up one message that waits."""
    with state_of(config) as state:
        done = operators.discard(state, consumer, letter, cursor)
    _tell(consumer, done, "discarded", as_json=as_json)


@operator_app.command("dead-letters")
def dead_letters(
    consumer: OptionalName = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """List the changes that consumers went on without."""
    with state_of(config) as state:
        found = operators.dead_letters(state, consumer)
    if as_json:
        print_json(found)
        return
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


@operator_app.command("finish-source")
def finish_source(
    consumer: Name,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The database that has ended.")],
    again: Annotated[
        bool, typer.Option("--again", help="Take it back: the database counts again.")
    ] = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Wait for nothing more of a database that has ended, in event-time order."""
    with state_of(config) as state:
        done = operators.finish_source(state, consumer, source, finished=not again)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{source} of {consumer} {'counts again' if again else 'has ended'}")


@operator_app.command("accept-gap")
def accept_gap(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The database.")],
    lsn: Annotated[str, typer.Argument(metavar="LSN", help="Where to go on, as health names it.")],
    confirmed: Confirmed = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Go on without the changes that a source has lost; its sinks get gap messages."""
    confirm(f"give up what {source} has lost below {lsn}?", confirmed=confirmed)
    with state_of(config) as state:
        gaps = operators.accept_gap(state, source, lsn)
    if as_json:
        print_json(gaps)
        return
    for gap in gaps:
        typer.echo(f"{gap['consumer']} will never get {gap['from']} to {gap['to']}")
    typer.echo(f"{source} stands at {lsn}")


@operator_app.command()
def forget(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The sink, or with --database that.")],
    database: Annotated[
        bool, typer.Option("--database", help="NAME is a database, not a sink.")
    ] = False,
    confirmed: Confirmed = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Remove what is known of a sink or a database that the configuration no longer names."""
    _refuse_configured(config, name, database=database)
    what = f"database {name}" if database else f"sink {name}"
    confirm(f"remove the positions, queue and dead letters of {what}?", confirmed=confirmed)
    with state_of(config) as state:
        act = operators.forget_source if database else operators.forget
        count = act(state, name)
    if as_json:
        print_json({"forgotten": name, "count": count})
    else:
        typer.echo(f"{what} is forgotten")


def _refuse_configured(config: ConfigPath, name: str, *, database: bool) -> None:
    from cdc.config import load

    settings = load(config)
    known = (
        {each.name for each in settings.databases}
        if database
        else {f"{source}/{sink.name}" for sink in settings.sinks for source in sink.sources}
        | {sink.name for sink in settings.sinks}
    )
    if name in known:
        raise OperatorError(
            f"{config} names {name}, so a service would make it again",
            fix="take it out of the file first, and apply that or start the service",
        )


def _tell(
    consumer: str, state: State, what: str = "", *, says_none: bool = True, as_json: bool
) -> None:
    """The consumer's new state in one or two lines, under the name it was given.

    The first counts the messages to which something was done; without ``says_none`` only if any.
    """
    if as_json:
        print_json(state)
        return
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
