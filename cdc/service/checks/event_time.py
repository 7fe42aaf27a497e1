"""Whether sinks that order by event time can read it: its type, and its column in every table.

It is done by ``walbrook config check`` and when a sink is served; what is wrong whatever the tables
are keeps the service from starting. Invariants: all problems are reported at once, each with
its place in the file; what is checked are the columns that the publication shows of the tables that
are there, so a table that comes later stops nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cdc.config import Config, Database, EventTime, SinkConfig
from cdc.config.event_time import BY_COMMIT
from cdc.errors import ConfigError
from cdc.eventtime.types import EventTimeType, resolve
from cdc.service.checks.published_tables import PublishedTables, ShownTable, shown_by

_LISTED_MAX: Final = 20


@dataclass
class _Found:
    """Problems with their places in the file, and what could not be looked at."""

    of_form: list[str] = field(default_factory=list)  # whatever the tables are
    of_tables: list[str] = field(default_factory=list)  # with the tables as they are now
    unchecked: list[str] = field(default_factory=list)


def check_event_time(config: Config, *, form_alone: bool = False) -> list[str]:
    """What could not be checked; ConfigError with everything that is wrong.

    ``form_alone`` leaves out what concerns tables: a sink that does not fit its own fails alone.
    """
    found = _check(config, [sink for sink in config.sinks if sink.status == "active"])
    if problems := [*found.of_form, *(() if form_alone else found.of_tables)]:
        raise _refusal(problems)
    return found.unchecked


def event_time_problem(config: Config, sink: SinkConfig) -> ConfigError | None:
    """Why the event times of one sink cannot be read, if so."""
    found = _check(config, [sink])
    problems = [*found.of_form, *found.of_tables]
    return _refusal(problems) if problems else None


def _check(config: Config, of_sinks: Sequence[SinkConfig]) -> _Found:
    sinks = [
        (f"sinks[{config.sinks.index(sink)}]", sink, sink.event_time)
        for sink in of_sinks
        if sink.event_time is not None
    ]
    by_clock = {place for place, sink, _ in sinks if sink.ordering == "processing_time"}
    read = {source for _, sink, _ in sinks for source in sink.sources}
    databases = [database for database in config.databases if database.name in read]
    shown = {database.name: shown_by(database) for database in databases}
    types: dict[str, EventTimeType] = {}
    found = _Found()
    for place, sink, event_time in sinks:
        found.of_form += _unknown_types(f"{place}.event_time", event_time, types)
        of_sink = [shown[source] for source in sink.sources]
        found.of_tables += _shown_nowhere(place, sink, of_sink)
        found.unchecked += _without_effect(f"{place}.event_time", event_time, of_sink)
        for database in databases if place not in by_clock else ():
            if database.name in sink.sources:
                for table in shown[database.name].tables:
                    if sink.source.takes(table.schema, table.name):
                        found.of_tables += _unfit(
                            f"{place}.event_time", event_time, database, table, types
                        )
    found.unchecked = [
        *(
            f"the event time of tables of database {name}: {each.why_not}"
            for name, each in shown.items()
            if each.why_not
        ),
        *found.unchecked,
    ]
    return found


def _without_effect(
    place: str, event_time: EventTime, shown: Sequence[PublishedTables]
) -> Iterator[str]:
    """Tables that are not published, or not yet: what is said of them has no effect until then."""
    if any(found.why_not for found in shown):
        return
    known = {str(table) for found in shown for table in found.tables}
    known |= {".".join(t.root) for found in shown for t in found.tables if t.root is not None}
    for j, table in enumerate(event_time.tables):
        if str(table.name) not in known:
            near = difflib.get_close_matches(str(table.name), sorted(known), n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"{place}.tables[{j}].name: nobody publishes {table.name} yet{hint}"


def _unknown_types(
    place: str, event_time: EventTime, types: dict[str, EventTimeType]
) -> Iterator[str]:
    """Problems with the types themselves; those that are found are put into ``types``."""
    given = [("type", event_time.type)]
    given += [
        (f"tables[{j}].type", table.type)
        for j, table in enumerate(event_time.tables)
        if table.type is not None
    ]
    for key, name in given:
        try:
            types[name] = resolve(name)
        except ConfigError as error:
            yield f"{place}.{key}: {error}"


def _shown_nowhere(place: str, sink: SinkConfig, shown: Sequence[PublishedTables]) -> Iterator[str]:
    """Names that a sink of several databases asks for and none of them has.

    For a sink of one database this is found where the source is prepared, which knows no other.
    """
    if len(shown) < 2 or any(found.why_not for found in shown):
        return
    tables = [str(table) for found in shown for table in found.tables]
    schemas = [schema for found in shown for schema in found.schemas]
    for kind, names, known in (
        ("tables", sink.source.include_tables, tables),
        ("schemas", sink.source.include_schemas, schemas),
    ):
        for k, name in enumerate(names or ()):
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "publish it in one, or take it out"
                yield (
                    f"{place}.source.include_{kind}[{k}]: none of the databases "
                    f"{', '.join(sink.sources)} publishes {name}. To fix it: {hint}"
                )


def _unfit(
    place: str,
    event_time: EventTime,
    database: Database,
    table: ShownTable,
    types: Mapping[str, EventTimeType],
) -> Iterator[str]:
    """Why the event time of one table cannot be read, if so."""
    where = f"{table} of database {database.name}"
    time = event_time.of_table(table.schema, table.name, table.root)
    if time is None:
        yield (
            f"{place}.column: is not given, and nothing else says which column of {where} has the "
            f"event time. To fix it: give it, name {table} under event_time.tables, or leave the "
            "table out with source.exclude_tables"
        )
        return
    column_place, type_place = _places(place, event_time, table)
    column_type = table.columns.get(time.column)
    if time.may_be_either and column_type is not None:
        yield (
            f"{column_place}: {where} has a column {time.column} of its own. To fix it: write "
            f"record.{time.column} for that column, or metadata.{time.column} for the time of the "
            "commit"
        )
    elif time.type == BY_COMMIT:
        return
    elif column_type is None:
        yield (
            f"{column_place}: {where} shows no column {time.column} in publication "
            f"{database.publication.name}. To fix it: {_instead(time.column, table)}"
        )
    elif time.type in types and not types[time.type].reads(column_type):
        readable = ", ".join(sorted(types[time.type].column_types or ()))
        yield (
            f"{type_place}: {time.type} cannot read {time.column} of {where}, which is "
            f"{column_type}. To fix it: give a column that is one of {readable}, or another type"
        )


def _places(place: str, event_time: EventTime, table: ShownTable) -> tuple[str, str]:
    """Where the file gives the column and the type of a table."""
    j = event_time.entry_of(table.schema, table.name, table.root)
    entry = None if j is None else event_time.tables[j]
    own = f"{place}.tables[{j}]"
    column = f"{own if entry and entry.column else place}.column"
    return column, f"{own if entry and entry.type else place}.type"


def _instead(column: str, table: ShownTable) -> str:
    near = difflib.get_close_matches(column, table.columns, n=1)
    if near:
        return f"did you mean {near[0]}?"
    listed = [*table.columns][:_LISTED_MAX]
    more = ", and others" if len(table.columns) > len(listed) else ""
    out = "leave the table out with source.exclude_tables"
    if not listed:
        return out
    return (
        f"it has {', '.join(listed)}{more}; name one for {table} under event_time.tables, or {out}"
    )


def _refusal(problems: Sequence[str]) -> ConfigError:
    listed = [*problems[:_LISTED_MAX]]
    if len(problems) > len(listed):
        listed.append(f"and {len(problems) - len(listed)} more")
    return ConfigError("\n  ".join(["event times cannot be read:", *listed]))
