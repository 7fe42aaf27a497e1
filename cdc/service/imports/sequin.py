"""``sequin.yaml``: databases, endpoints, functions, sinks, change retentions.

References to environment variables stay as they are: both products write them in one way.
"""

from __future__ import annotations

from typing import Final

import yaml

from cdc.errors import OperatorError
from cdc.service.imports.imported import Imported, Section, section, sections, taken
from cdc.service.imports.sequin_destinations import destination_of
from cdc.service.imports.sequin_filters import expression_of

_SECTIONS: Final = (
    "account", "api_tokens", "change_retentions", "databases", "functions", "http_endpoints",
    "sinks", "transforms", "users",
)  # fmt: skip
_SERVER: Final = {
    "hostname": "hostname",
    "port": "port",
    "database": "database",
    "username": "username",
    "password": "password",
}
_DATABASE: Final = (
    *_SERVER, "name", "ssl", "slot", "slot_name", "publication", "publication_name", "primary",
    "pool_size", "await_database", "tables", "use_local_tunnel", "annotations", "id",
)  # fmt: skip
_SINK: Final = {
    "name": "name",
    "database": "database",
    "status": "status",
    "source": "source",
    "actions": "actions",
    "message_grouping": "message_grouping",
    "batch_size": "batch_size",
    "timestamp_format": "timestamp_format",
    "max_retry_count": "max_deliveries",
}
_SINK_READ: Final = (
    *_SINK, "id", "table", "schema", "tables", "group_column_names", "filter", "filters",
    "transform", "routing", "routing_mode", "enrichment", "destination", "initial_backfill",
    "load_shedding_policy", "annotations", "max_memory_mb", "partition_count",
)  # fmt: skip
_EXPRESSIONS: Final = "write it as an expression or a Python function: docs/expressions.md"


def import_sequin(text: str) -> Imported:
    """What the file says, as sections of ours."""
    try:
        read = section(yaml.safe_load(text))
    except yaml.YAMLError as error:
        at = getattr(error, "problem_mark", None)
        raise OperatorError(
            "the file is not YAML" + ("" if at is None else f" (line {at.line + 1})"),
            fix="give a sequin.yaml",
        ) from None
    if "databases" not in read:
        raise OperatorError("the file has no databases", fix="give a sequin.yaml")
    found = Imported()
    for key in sorted(read.keys() - set(_SECTIONS)):
        found.remark(key, "is no section of a sequin.yaml", "it is left out")
    for key in ("account", "users"):
        if key in read:
            found.remark(
                key,
                "Walbrook has no accounts",
                "roles in SQL and service.http.tokens say who may act",
            )
    _tokens(read, found)
    servers = {str(each.get("name")): each for each in sections(read.get("databases"))}
    for each in servers.values():
        _database(each, found)
    functions = _functions(read, found)
    endpoints = {str(each.get("name")): each for each in sections(read.get("http_endpoints"))}
    for each in sections(read.get("sinks")):
        _sink(each, functions, endpoints, found)
    for each in sections(read.get("change_retentions")):
        _retention(each, servers, found)
    return found


def _tokens(read: Section, found: Imported) -> None:
    for each in sections(read.get("api_tokens")):
        token = str(each.get("token", ""))
        if len(token) >= 16 or token.startswith("${"):
            found.tokens.append({"name": each.get("name"), "token": token})
        else:
            found.remark(
                f"api_tokens.{each.get('name')}",
                "is shorter than 16 characters",
                "make one with openssl rand -hex 32 and put it into service.http.tokens",
            )


def _database(each: Section, found: Imported) -> None:
    where = f"databases.{each.get('name')}"
    slot, publication = section(each.get("slot")), section(each.get("publication"))
    database: Section = {
        "name": each.get("name"),
        "username": "postgres",  # what Sequin takes if nothing is said
        **taken(each, _SERVER),
        "slot": {
            "name": slot.get("name") or each.get("slot_name"),
            **taken(slot, {"create_if_not_exists": "create_if_not_exists"}),
        },
        "publication": {
            "name": publication.get("name") or each.get("publication_name"),
            **taken(
                publication,
                {"create_if_not_exists": "create_if_not_exists", "init_sql": "init_sql"},
            ),
        },
    }
    if each.get("ssl") in (True, "true"):
        database["sslmode"] = "require"
        found.remark(
            f"{where}.ssl",
            "Sequin verifies no certificate, and sslmode: require does not either",
            "set sslmode: verify-full and sslrootcert",
        )
    if each.get("primary"):
        found.remark(f"{where}.primary", "is an address", "write it as the URL primary_url")
    for key, why in {
        "pool_size": "Walbrook has no pool of connections to size",
        "await_database": "Walbrook waits for a database by itself",
        "tables": "the publication says which tables are read",
        "use_local_tunnel": "Walbrook has no tunnel",
        "annotations": "Walbrook has no annotations of databases",
    }.items():
        if each.get(key) is not None:
            found.remark(f"{where}.{key}", why, "it is left out")
    found.remark(
        where,
        "its slot is read by Sequin now, and a slot has one reader",
        "stop Sequin first: Walbrook goes on where the slot was confirmed",
    )
    found.unknown(where, each, _DATABASE)
    found.databases.append(database)


def _functions(read: Section, found: Imported) -> dict[str, Section]:
    """All functions by name; those with code are named one by one."""
    functions = {str(each.get("name")): each for each in sections(read.get("functions"))}
    for old in sections(read.get("transforms")):
        functions[str(old.get("name"))] = {"name": old.get("name"), **section(old.get("transform"))}
    for name, each in functions.items():
        kind = each.get("type", "transform")
        if kind == "path":
            continue
        language = "SQL" if kind == "enrichment" else "MiniElixir"
        do = _EXPRESSIONS
        if kind == "enrichment":
            do = "join at the destination, or look it up in a Python function: docs/expressions.md"
        found.remark(f"functions.{name}", f"is written in {language} (type {kind})", do)
    return functions


def _sink(
    each: Section, functions: dict[str, Section], endpoints: dict[str, Section], found: Imported
) -> None:
    where = f"sinks.{each.get('name')}"
    found.unknown(where, each, _SINK_READ)
    destination = destination_of(each, endpoints, where, found)
    if destination is None:
        return
    sink: Section = taken(each, _SINK)
    if destination.get("batch") in (False, "false") and sink.pop("batch_size", 1) != 1:
        found.remark(f"{where}.batch_size", "has no effect with batch: false", "it is left out")
    _tables(each, sink)
    known = len(found.remarks)
    _expressions(each, sink, functions, where, found)
    if len(found.remarks) > known:
        found.disable(sink, where)
    backfill = each.get("initial_backfill")
    if isinstance(backfill, list):
        sink["initial_backfill"] = [str(b["table"]) for b in sections(backfill) if "table" in b]
        if any(b.get("type") == "partial" for b in sections(backfill)):
            found.remark(
                f"{where}.initial_backfill",
                "a part of a table is asked for, and all of it will come",
                "or leave it out and use walbrook backfill start --sort-column --start-position",
            )
    elif backfill:
        sink["initial_backfill"] = True
    if "max_retry_count" not in each:
        sink["max_deliveries"] = 1000
        found.remark(
            where,
            "Sequin tries a refused message for ever",
            "max_deliveries is set to 1000, after which it is a dead letter",
        )
    if each.get("load_shedding_policy") == "discard_on_full":
        found.remark(
            f"{where}.load_shedding_policy",
            "discard_on_full drops changes",
            "set max_backlog: {size: …, on_full: evict}, which also says what is lost",
        )
    for key in ("annotations", "max_memory_mb", "partition_count"):
        if each.get(key) is not None:
            found.remark(f"{where}.{key}", "has no equivalent", "it is left out")
    found.sinks.append({**sink, "destination": destination})


def _tables(each: Section, sink: Section) -> None:
    """Older files name one table or schema; newer ones have ``source`` and ``tables``."""
    if each.get("table"):
        sink["source"] = {"include_tables": [each["table"]]}
    elif each.get("schema"):
        sink["source"] = {"include_schemas": [each["schema"]]}
    columns = each.get("group_column_names")
    if each.get("table") and columns:
        sink["tables"] = [{"name": each["table"], "group_column_names": columns}]
    grouped = [one for one in sections(each.get("tables")) if one.get("group_column_names")]
    if grouped:
        sink["tables"] = [
            {"name": one.get("name"), "group_column_names": one["group_column_names"]}
            for one in grouped
        ]


def _expressions(
    each: Section, sink: Section, functions: dict[str, Section], where: str, found: Imported
) -> None:
    for key in ("filter", "transform", "routing", "enrichment"):
        name = each.get(key)
        if name in (None, "none"):
            continue
        function = functions.get(str(name), {})
        path = str(function.get("path", "")) if function.get("type") == "path" else ""
        if key == "transform" and path == "record":
            sink["shape"] = "record"
        elif key == "transform" and (path == "action" or path.startswith("record.")):
            sink["transform"] = path
        else:
            what = f"uses the path {path}" if path else f"uses the function {name}"
            found.remark(f"{where}.{key}", what, _EXPRESSIONS)
    conditions = expression_of(sections(each.get("filters")), f"{where}.filters", found)
    if conditions:
        sink["filter"] = conditions


def _retention(each: Section, servers: dict[str, Section], found: Imported) -> None:
    """A table of events in a database."""
    where = f"change_retentions.{each.get('name')}"
    target = servers.get(str(each.get("destination_database")), {})
    table = f"{each.get('source_table_schema', 'public')}.{each.get('source_table_name')}"
    schema = each.get("destination_table_schema", "public")
    events = f"{schema}.{each.get('destination_table_name')}"
    sink: Section = {
        "name": each.get("name"),
        "database": each.get("source_database"),
        "source": {"include_tables": [table]},
        **taken(each, {"actions": "actions"}),
    }
    known = len(found.remarks)
    conditions = expression_of(sections(each.get("filters")), f"{where}.filters", found)
    if conditions:
        sink["filter"] = conditions
    if len(found.remarks) > known:
        found.disable(sink, where)
    found.remark(
        where,
        f"the table of mode events has other columns than {events}",
        "it gets a name of its own; rename the old one, or copy its rows",
    )
    server = {"username": "postgres", **taken(target, _SERVER)}
    found.sinks.append(
        {
            **sink,
            "destination": {
                "type": "postgres",
                **server,
                "mode": "events",
                "table": f"{events}_walbrook",
            },
        }
    )
