"""Properties of Debezium's Postgres connector, of Debezium Server or of Kafka Connect.

Debezium Server prefixes them with ``debezium.source.`` and ``debezium.sink.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import orjson

from cdc.errors import OperatorError
from cdc.service.imports.debezium_sinks import sink_destination
from cdc.service.imports.imported import Imported, Section
from cdc.service.imports.properties import parse_properties

_SOURCE: Final = "debezium.source."
_CONNECTOR: Final = "io.debezium.connector.postgresql.PostgresConnector"
_SERVER: Final = {
    "database.hostname": "hostname",
    "database.port": "port",
    "database.dbname": "database",
    "database.user": "username",
    "database.password": "password",
    "database.sslmode": "sslmode",
    "database.sslrootcert": "sslrootcert",
    "database.sslcert": "sslcert",
    "database.sslkey": "sslkey",
}
_FILTERS: Final = {
    "table.include.list": "include_tables",
    "table.whitelist": "include_tables",
    "table.exclude.list": "exclude_tables",
    "table.blacklist": "exclude_tables",
    "schema.include.list": "include_schemas",
    "schema.whitelist": "include_schemas",
    "schema.exclude.list": "exclude_schemas",
    "schema.blacklist": "exclude_schemas",
}
_LITERAL: Final = re.compile(r"[\w$]+(\\?\.[\w$]+)?")
_SKIPPED: Final = {"c": "insert", "u": "update", "d": "delete", "t": "truncate"}
_READ: Final = {
    *_SERVER, *_FILTERS, "connector.class", "name", "topic.prefix", "database.server.name",
    "plugin.name", "slot.name", "slot.drop.on.stop", "slot.failover", "publication.name",
    "publication.autocreate.mode", "snapshot.mode", "tombstones.on.delete",
    "decimal.handling.mode", "heartbeat.interval.ms", "skipped.operations",
    "message.key.columns", "transforms", "key.converter", "value.converter",
    "key.converter.schemas.enable", "value.converter.schemas.enable",
}  # fmt: skip
_HIDES_COLUMNS: Final = re.compile(r"column\.")  # it leaves out, masks, hashes or shortens some
_NOT_NEEDED: Final = re.compile(
    r"tasks\.max|offset\.|max\.batch\.size|max\.queue\.size|poll\.interval\.ms|errors\.|"
    r"(database|schema)\.history\.|topic\.creation\.|key\.converter\.|value\.converter\.|"
    r"heartbeat\.action\.query|status\.update\.interval\.ms|retriable\.restart|slot\.max\.retries|"
    r"slot\.retry\.delay\.ms|include\.schema\.changes|flush\.lsn\.source|config\."
)
_REMARKS: Final = (
    (r"signal\.", "signals are for incremental snapshots", "use walbrook backfill start"),
    (r"incremental\.snapshot\.", "Walbrook sizes chunks itself", "see docs/backfill.md"),
    (r"snapshot\.", "existing rows come by backfills", "see docs/backfill.md"),
    (r"column\.", "columns are not chosen by patterns",
     "give the publication a column list, or write a transform: docs/expressions.md"),
    (r"(binary|interval|hstore)\.", "types have one form each", "see docs/types.md"),
    (r"time\.precision\.mode", "see how times are written in docs/sinks/kafka.md",
     "set timestamp_format"),
    (r"provide\.transaction\.metadata", "there are no messages of transactions",
     "every message has source.txId and its place in the transaction"),
    (r"database\.initial\.statements|slot\.stream\.params", "is not taken over",
     "set it for the role: ALTER ROLE … SET"),
)  # fmt: skip


def import_debezium(text: str) -> Imported:
    """What the file says, as sections of ours."""
    given = _given(text)
    source = {
        key.removeprefix(_SOURCE): value
        for key, value in given.items()
        if key.startswith(_SOURCE) or not key.startswith(("debezium.", "quarkus."))
    }
    if source.get("connector.class", _CONNECTOR) != _CONNECTOR:
        raise OperatorError(
            f"connector.class is {source['connector.class']}", fix=f"give one of {_CONNECTOR}"
        )
    if "database.hostname" not in source and "database.dbname" not in source:
        raise OperatorError(
            "the file has no database.hostname and no database.dbname",
            fix="give the properties of a Postgres connector, or of Debezium Server with one",
        )
    found = Imported()
    name = source.get("topic.prefix") or source.get("database.server.name") or "debezium"
    filters = _filters(source, found)
    found.databases.append(_database(source, name, filters, found))
    sink: Section = {"name": source.get("name") or f"{name}-changes", "shape": "debezium"}
    if filters:
        sink["source"] = filters
    _sink(source, sink, found)
    known = len(found.remarks)
    _transforms(source, given, sink, found)
    if len(found.remarks) > known or any(_HIDES_COLUMNS.match(key) for key in source):
        found.disable(sink, "the sink")
    sink["destination"] = sink_destination(given, source, name, found)
    found.sinks.append(sink)
    for key in sorted(source.keys() - _READ):
        if not key.startswith("transforms.") and not _NOT_NEEDED.match(key):
            found.remark(key, *_reason(key))
    return found


def _given(text: str) -> Mapping[str, str]:
    """A properties file, or the JSON that Kafka Connect takes."""
    if not text.lstrip().startswith("{"):
        return parse_properties(text)
    try:
        read = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise OperatorError("the file is not JSON", fix="give properties, or JSON") from None
    config = read.get("config", read)
    named = {"name": read["name"]} if "name" in read else {}
    return {key: str(value) for key, value in {**named, **config}.items()}


def _reason(key: str) -> tuple[str, str]:
    for pattern, what, do in _REMARKS:
        if re.match(pattern, key):
            return what, do
    return "has no equivalent", "it is left out"


def _filters(source: Mapping[str, str], found: Imported) -> Section:
    """The lists as names; a regular expression is a remark."""
    filters: Section = {}
    for key, ours in _FILTERS.items():
        names = [each.strip() for each in source.get(key, "").split(",") if each.strip()]
        literal = [each.replace("\\.", ".") for each in names if _LITERAL.fullmatch(each)]
        for each in names:
            if not _LITERAL.fullmatch(each):
                found.remark(
                    key, f"{each} is a regular expression", "name the tables or schemas one by one"
                )
        if literal:
            filters[ours] = literal
    return filters


def _database(source: Mapping[str, str], name: str, filters: Section, found: Imported) -> Section:
    database: Section = {"name": re.sub(r"[^A-Za-z0-9_-]", "_", name)}
    database |= {ours: source[key] for key, ours in _SERVER.items() if key in source}
    plugin = source.get("plugin.name", "decoderbufs")
    slot: Section = {"name": source.get("slot.name", "debezium"), "create_if_not_exists": True}
    if plugin != "pgoutput":
        slot["name"] = f"{slot['name']}_pgoutput"
        found.remark(
            "plugin.name",
            f"the slot is of {plugin}, and Walbrook reads pgoutput",
            "a slot of another name is created; what the old one still holds is not read",
        )
    else:
        found.remark(
            "slot.name",
            "the slot is read by Debezium now, and a slot has one reader",
            "stop Debezium first: Walbrook goes on where the slot was confirmed",
        )
    if source.get("slot.failover") == "true":
        slot["failover"] = True
    if source.get("slot.drop.on.stop") == "true":
        found.remark("slot.drop.on.stop", "Walbrook drops no slot", "drop it by hand at the end")
    return {**database, "slot": slot, "publication": _publication(source, filters)}


def _publication(source: Mapping[str, str], filters: Section) -> Section:
    name = source.get("publication.name", "dbz_publication")
    publication: Section = {"name": name}
    mode = source.get("publication.autocreate.mode", "all_tables")
    if mode in ("disabled", "no_tables"):
        return publication
    publication["create_if_not_exists"] = True
    if mode == "filtered" and "include_tables" in filters:
        publication["tables"] = filters["include_tables"]
    else:
        quoted = name.replace('"', '""')
        publication["init_sql"] = f'CREATE PUBLICATION "{quoted}" FOR ALL TABLES'
    return publication


def _sink(source: Mapping[str, str], sink: Section, found: Imported) -> None:
    skipped = {each.strip() for each in source.get("skipped.operations", "t").split(",")}
    actions = [action for letter, action in _SKIPPED.items() if letter not in skipped]
    sink["actions"] = actions
    mode = source.get("snapshot.mode", "initial")
    if mode in ("initial", "always", "when_needed", "initial_only"):
        sink["initial_backfill"] = True
    if mode not in ("initial", "never", "no_data"):
        found.remark(
            "snapshot.mode", f"{mode} has no equivalent", "initial_backfill gives rows once"
        )
    decimals = source.get("decimal.handling.mode", "precise")
    if decimals == "string":
        sink["number_format"] = "string"
    elif decimals == "precise":
        found.remark(
            "decimal.handling.mode",
            "precise writes numeric as bytes, Walbrook as a number with every digit",
            "set number_format: string if readers cannot read that",
        )
    heartbeat = source.get("heartbeat.interval.ms", "0")
    if heartbeat.isdigit() and int(heartbeat):
        found.databases[-1]["heartbeat_s"] = max(1, int(heartbeat) // 1000)
    tables = []
    for each in source.get("message.key.columns", "").split(";"):
        table, _, columns = each.strip().partition(":")
        if columns and _LITERAL.fullmatch(table):
            names = [column.strip() for column in columns.split(",")]
            tables.append({"name": table.replace("\\.", "."), "group_column_names": names})
        elif each.strip():
            found.remark("message.key.columns", f"{each} is not taken over", "set tables by hand")
    if tables:
        sink["tables"] = tables


def _transforms(
    source: Mapping[str, str], given: Mapping[str, str], sink: Section, found: Imported
) -> None:
    """Message transforms by name; the one that unwraps rows is a shape of ours."""
    named = source.get("transforms") or given.get("debezium.transforms") or ""
    for name in filter(None, (each.strip() for each in named.split(","))):
        kind = (
            source.get(f"transforms.{name}.type")
            or given.get(f"debezium.transforms.{name}.type")
            or ""
        )
        if kind.endswith("ExtractNewRecordState"):
            sink["shape"] = "record"
            continue
        found.remark(
            f"transforms.{name}",
            f"is a transform in Java ({kind.rpartition('.')[2] or 'of no type'})",
            "write filter, transform or routing: docs/expressions.md",
        )
