"""``walbrook trace``: what became of one change, for every consumer; live, what a sink makes of it.

A trace reads the log and the records of delivery on this machine, and the state database. Values
of rows are printed only with ``--payload``, and by a live trace, which is asked for them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cdc.errors import OperatorError
from cdc.service.cli.options import DEFAULT_CONFIG, ConfigPath, command_group, state_of

if TYPE_CHECKING:
    from cdc.connection import Connection
    from cdc.cursor import Cursor
    from cdc.trace.tracer import Tracer

trace_app = command_group()

_LOOK_S: Final = 0.2
_LAST_S: Final = 2.0  # for samples that are on their way when a live trace ends


@trace_app.command()
def trace(
    key: Annotated[
        str | None,
        typer.Option(help="The row: schema.table/key, such as public.orders/42."),
    ] = None,
    cursor: Annotated[
        str | None, typer.Option(help="The change's cursor: LSN:index, such as 16/B374D848:3.")
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="metadata.idempotency_key of a message, such as 29007648:0.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--source", "-s", help="The database, if there are several."),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--from", help="With --key: no changes below this cursor.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100, help="With --key: the latest so many changes.")
    ] = 1,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Evaluate the sinks' filters, which may need Spark.")
    ] = False,
    payload: Annotated[
        bool, typer.Option("--payload", help="Print the row's values as well.")
    ] = False,
    live: Annotated[
        str | None,
        typer.Option(metavar="SINK", help="Watch what a sink's expressions see and make of it."),
    ] = None,
    seconds: Annotated[int, typer.Option(min=1, max=600, help="With --live: for how long.")] = 30,
    sample: Annotated[
        int, typer.Option(min=1, max=100, help="With --live: at most so many changes per second.")
    ] = 10,
    as_lines: Annotated[bool, typer.Option("--json", help="One JSON object per change.")] = False,
    config: ConfigPath = DEFAULT_CONFIG,
) -> None:
    """Show what became of a change: committed, logged, matched, sent, refused, settled."""
    asked = [each for each in (key, cursor, idempotency_key, live) if each is not None]
    if len(asked) != 1:
        raise OperatorError(
            "it is not clear what to trace",
            fix="give one of --key, --cursor, --idempotency-key and --live",
        )
    if live is not None:
        with state_of(config) as state:
            for line in _live(state, live, seconds, sample):
                typer.echo(line)
        return
    import orjson

    from cdc.config import load
    from cdc.service.trace_filters import evaluate_filters
    from cdc.trace.change import read_any_cursor
    from cdc.trace.text import as_json, lines_of
    from cdc.trace.tracer import Tracer

    tracer = Tracer(load(config))
    name = tracer.source(source)
    if key is not None:
        found = _changes_of(tracer, name, key, limit, since)
    else:
        found = [read_any_cursor(cursor or idempotency_key or "")]
    with state_of(config) as state:
        for at, each in enumerate(found):
            filters = evaluate_filters(config, name, each) if evaluate else None
            traced = tracer.trace(state, name, each, filters)
            if as_lines:
                typer.echo(orjson.dumps(as_json(traced, payload=payload)).decode())
            else:
                typer.echo("\n" * bool(at) + "\n".join(lines_of(traced, payload=payload)))


def _changes_of(
    tracer: Tracer, source: str, key: str, limit: int, since: str | None
) -> list[Cursor]:
    """The latest changes of a row that the log has."""
    from cdc.trace.change import RowKey, read_any_cursor

    start = None if since is None else read_any_cursor(since)
    found = [each.cursor for each in tracer.changes_of(source, RowKey.parse(key), limit, start)]
    if not found:
        raise OperatorError(
            f"the log of {source} has no change of {key}",
            fix="walbrook log ls shows how far back it goes; a row that came by a backfill is not "
            "in the log; a change that is committed comes within moments; the columns of a key are "
            "written in key order",
        )
    return found


def _live(state: Connection, sink: str, seconds: int, per_second: int) -> Iterator[str]:
    """Samples as they come, as JSON, until the time is over or the trace is ended."""
    from cdc.state.operators import refusals
    from cdc.state.traces import end_live_trace, fetch_samples, start_live_trace

    with refusals():
        trace_id = start_live_trace(state, sink, seconds, per_second)
    until = time.monotonic() + seconds + _LAST_S
    try:
        while time.monotonic() < until:
            yield from fetch_samples(state, trace_id)
            sys.stdout.flush()
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        pass
    finally:
        end_live_trace(state, trace_id)
