"""What ``walbrook status`` shows: sources, consumers, cursors, lag, straight from SQL.

It is made for 80 columns: names may fold, cursors and numbers never do, and errors stand below the
tables as lines, where they can be as long as they are. Colours are left to the console, which uses
them on terminals only.
"""

from __future__ import annotations

from datetime import datetime
from itertools import groupby
from typing import Any

import psycopg
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cdc.service.cli.row_listing import size_text

_SOURCES = """
SELECT name, state, date_trunc('second', clock_timestamp() - state_since)::text, slot,
       restart_lsn || ':' || restart_idx, last_error,
       (SELECT f.last_error FROM walbrook.feeds f WHERE f.source = sources.name), log_bytes,
       earliest_lsn || ':' || earliest_idx,
       CASE WHEN (evicted_lsn, evicted_idx) > ('0/0', 0)
            THEN evicted_lsn || ':' || evicted_idx END
  FROM walbrook.sources ORDER BY name
"""
_EVENTS = """
SELECT source, consumer, severity, date_trunc('second', clock_timestamp() - since)::text, what, fix
  FROM walbrook.health
"""
_PRESSURE = """
SELECT level, widened_by, deferred, backlog_rows, backlog_bytes, latency_s
  FROM walbrook.pressure WHERE source = %s AND level > 0
"""
# Of each consumer the tables that hold the others back come first.
_WATERMARKS = """
SELECT consumer, reached, tables, source, "table", watermark, idle_since, finished, buffered,
       late_count
  FROM (SELECT w.*, count(*) OVER (PARTITION BY w.consumer) AS tables,
               row_number() OVER (PARTITION BY w.consumer
                                  ORDER BY w.idle_since IS NOT NULL OR w.finished,
                                           w.watermark NULLS FIRST, w.source, w."table") AS place
          FROM (SELECT w.consumer, w.source, w."table", w.idle_since, w.buffered, w.late_count,
                       to_char(w.watermark, 'YYYY-MM-DD HH24:MI:SS') AS watermark,
                       to_char(w.released_to, 'YYYY-MM-DD HH24:MI:SS') AS reached,
                       e.finished_at IS NOT NULL AS finished
                  FROM walbrook.watermarks w
                  JOIN walbrook.consumers c ON c.source = w.source AND c.name = w.consumer
                  LEFT JOIN walbrook.event_sources e ON e.consumer = c.id) w) placed
 WHERE place <= %s ORDER BY consumer, place
"""
_WATERMARKS_MAX = 20  # of a consumer
_CONSUMERS = """
SELECT c.name, c.cursor_lsn || ':' || c.cursor_idx, v.lag_bytes, v.lag_seconds,
       c.delivered, c.absorbed, c.moved_at, c.active, c.last_error, walbrook.dead_ever(c),
       CASE WHEN c.active AND c.disabled_at IS NOT NULL
            THEN 'is disabled since ' || to_char(c.disabled_at, 'YYYY-MM-DD HH24:MI:SS')
                 || ' (' || c.disabled_reason || ')'
            WHEN c.active AND p.paused_at IS NOT NULL
            THEN 'is paused since ' || to_char(p.paused_at, 'YYYY-MM-DD HH24:MI:SS')
            WHEN c.active AND c.state_reason IS NOT NULL
            THEN 'is ' || replace(coalesce(c.state, 'not served'), '_', ' ')
                 || CASE WHEN c.state IN ('waiting', 'failed') AND c.retry_at > clock_timestamp()
                         THEN ', tried again at ' || to_char(c.retry_at, 'HH24:MI:SS') ELSE '' END
                 || ': ' || CASE WHEN c.last_error IS NULL THEN c.state_reason
                                 ELSE split_part(c.state_reason, ':', 1) END END,
       (SELECT q.waiting FROM walbrook.queues q
         WHERE q.source = c.source AND q.consumer = c.name)
  FROM walbrook.consumers c
  LEFT JOIN walbrook.cursors v ON v.source = c.source AND v.consumer = c.name
  LEFT JOIN walbrook.event_sources e ON e.consumer = c.id
 -- One of several databases is paused in all of them, whichever was named.
 CROSS JOIN LATERAL (
       SELECT min(k.paused_at) AS paused_at FROM walbrook.consumers k
        WHERE k.id = c.id OR e.consumer IS NOT NULL AND k.name = c.name AND k.active) p
 WHERE c.source = %s ORDER BY c.active DESC, c.name
"""


def status_tables(connection: psycopg.Connection[tuple[Any, ...]]) -> Group:
    """The sources and their readers; of each its log and its consumers; then what is wrong."""
    sources = _table("Sources", "~source", "reader", "for", "~slot", "restart cursor")
    parts: list[RenderableType] = [sources]
    errors: list[Text] = []
    for row in connection.execute(_SOURCES).fetchall():
        name, state, since, slot, cursor, reader, feed, log_bytes, earliest, evicted = row
        sources.add_row(Text(name), state, since, Text(slot), cursor)
        errors += _error(f"reader {name}", reader) + _error(f"feed {name}", feed)
        parts += ("", *_log(name, log_bytes, earliest, evicted))
        parts += _consumers(connection, name, errors)
        parts += _pressure(connection, name)
    parts += _watermarks(connection)
    # One of several databases fails in all of them, for one reason.
    errors = list({error.plain: error for error in errors}.values())
    errors += _events(connection)
    return Group(*parts, *[""][: len(errors)], *errors)


def _log(source: str, size: int | None, earliest: str | None, evicted: str | None) -> list[Text]:
    """One line on the change log: its size, and from where on it can be read."""
    if size is None:
        return []
    lost = f", evicted below {evicted}" if evicted else ""
    return [Text(f"Log of {source}: {size_text(size)} from {earliest}{lost}")]


def _pressure(connection: psycopg.Connection[tuple[Any, ...]], source: str) -> list[Text]:
    """One line while there is more to deliver than can be delivered."""
    return [
        Text(
            f"Pressure on {source}: level {level}, {rows:,} changes ({size_text(size)}) wait for "
            f"up to {latency_s:.0f} s; micro-batches widened {widened_by:.0f} times"
            + (f", deferred: {', '.join(deferred)}" if deferred else ""),
            style="yellow",
        )
        for level, widened_by, deferred, rows, size, latency_s in connection.execute(
            _PRESSURE, (source,)
        ).fetchall()
    ]


def _events(connection: psycopg.Connection[tuple[Any, ...]]) -> list[Text]:
    """The open health events; what to do stands indented below each.

    What is said of a consumer in several of its databases is one event.
    """
    listed: dict[tuple[str | None, ...], tuple[list[str], str]] = {}
    for source, consumer, severity, age, what, fix in connection.execute(_EVENTS).fetchall():
        key = (None if consumer else source, consumer, severity, what, fix)
        listed.setdefault(key, ([], age))[0].append(source)
    lines: list[Text] = []
    for (_, consumer, severity, what, fix), (sources, age) in listed.items():
        who = ", ".join(sorted(sources)) + (f", consumer {consumer}" if consumer else "")
        style = "red" if severity == "error" else "yellow"
        lines.append(Text(f"{severity} {who} (for {age}): {what}", style=style))
        lines += [Text(f"  fix: {fix}")] if fix else []
    return lines


def _watermarks(connection: psycopg.Connection[tuple[Any, ...]]) -> list[RenderableType]:
    """The tables of each consumer in event-time order; nothing if there are none."""
    parts: list[RenderableType] = []
    rows = connection.execute(_WATERMARKS, (_WATERMARKS_MAX,)).fetchall()
    for (consumer, reached, tables), of_consumer in groupby(rows, lambda row: row[:3]):
        table = _table(
            f"Event time of {consumer}: its watermark is {reached or 'not known yet'}",
            "~source", "~table", "watermark", "idle since", ">buffered", ">late",
        )  # fmt: skip
        for *_, source, name, watermark, idle_since, finished, buffered, late in of_consumer:
            table.add_row(
                Text(source),
                Text(name),
                watermark or "none yet",
                "finished" if finished else _moved(idle_since) if idle_since else "",
                f"{buffered:,}",
                f"{late:,}",
            )
        more = tables - _WATERMARKS_MAX
        rest = [Text(f"and {more:,} more in walbrook.watermarks")] if more > 0 else []
        parts += ("", table, *rest)
    return parts


def _consumers(
    connection: psycopg.Connection[tuple[Any, ...]], source: str, errors: list[Text]
) -> list[RenderableType]:
    """The consumers of one source and who lacks what; what ails them is added to ``errors``."""
    lacking: list[str] = []
    waiting: list[str] = []
    alone: list[Text] = []
    table = _table(
        f"Consumers of {source}",
        "~consumer", "cursor", ">lag", ">lag s", ">delivered", ">absorbed",
        "moved",
    )  # fmt: skip
    for row in connection.execute(_CONSUMERS, (source,)).fetchall():
        name, cursor, lag_bytes, lag_s, delivered, absorbed, moved_at, active, *rest = row
        error, dead, apart, waits = rest
        table.add_row(
            Text(name),
            cursor,
            size_text(lag_bytes),
            "-" if lag_s is None else f"{lag_s:,.1f}",
            f"{delivered:,}",
            f"{absorbed:,}",
            _moved(moved_at) if active else "inactive",
            style=None if active else "dim",
        )
        errors += _error(f"consumer {name}", error if active else None)
        lacking += [f"{name} {dead:,}"] if dead else []
        waiting += [f"{name} {waits:,}"] if waits else []
        alone += [Text(f"{name} {apart}")] if apart else []
    dead_line = [Text(f"Dead letters ever: {', '.join(lacking)}")] if lacking else []
    wait_line = [Text(f"Waiting to be tried again: {', '.join(waiting)}")] if waiting else []
    return [table, *dead_line, *wait_line, *alone]


def _table(title: str, *headings: str) -> Table:
    """A table of plain columns. A heading after > is of numbers, one after ~ of names."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for heading in headings:
        table.add_column(
            heading.lstrip("~>"),
            justify="right" if heading.startswith(">") else "left",
            no_wrap=not heading.startswith("~"),
            overflow="fold",
            min_width=8 if heading.startswith("~") else None,
        )
    return table


def _error(who: str, error: str | None) -> list[Text]:
    return [Text(f"{who}: {error}", style="red")] if error else []


def _moved(at: datetime) -> str:
    """The time today, the date before."""
    return f"{at:%H:%M:%S}" if at.date() == datetime.now(at.tzinfo).date() else f"{at:%b %d}"
