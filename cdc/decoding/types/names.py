"""What a type is called: the spelling of Postgres' own ``format_type``.

OIDs below 10000 are the same on every server. All others (enums, domains, extensions' types, and
what ``initdb`` numbers as it goes) are known to one database only: they are called as its catalog
said, without their schema, or by their number where it was not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cdc.decoding.catalog import TypeNote
from cdc.decoding.types.builtin import ELEMENT_OF_ARRAY
from cdc.decoding.types.decimal import precision_and_scale

# fmt: off
_NAMES = {
    16: "boolean", 17: "bytea", 18: '"char"', 19: "name", 20: "bigint", 21: "smallint",
    22: "int2vector", 23: "integer", 24: "regproc", 25: "text", 26: "oid", 27: "tid", 28: "xid",
    29: "cid", 30: "oidvector", 114: "json", 142: "xml", 194: "pg_node_tree", 600: "point",
    601: "lseg", 602: "path", 603: "box", 604: "polygon", 628: "line", 650: "cidr", 700: "real",
    701: "double precision", 718: "circle", 774: "macaddr8", 790: "money", 829: "macaddr",
    869: "inet", 1033: "aclitem", 1042: "bpchar", 1043: "character varying", 1082: "date",
    1083: "time without time zone", 1114: "timestamp without time zone",
    1184: "timestamp with time zone", 1186: "interval", 1266: "time with time zone",
    1560: '"bit"', 1562: "bit varying", 1700: "numeric", 1790: "refcursor", 2202: "regprocedure",
    2203: "regoper", 2204: "regoperator", 2205: "regclass", 2206: "regtype", 2249: "record",
    2275: "cstring", 2950: "uuid", 2970: "txid_snapshot", 3220: "pg_lsn", 3361: "pg_ndistinct",
    3402: "pg_dependencies", 3614: "tsvector", 3615: "tsquery", 3642: "gtsvector",
    3734: "regconfig", 3769: "regdictionary", 3802: "jsonb", 3904: "int4range", 3906: "numrange",
    3908: "tsrange", 3910: "tstzrange", 3912: "daterange", 3926: "int8range", 4072: "jsonpath",
    4089: "regnamespace", 4096: "regrole", 4191: "regcollation", 4451: "int4multirange",
    4532: "nummultirange", 4533: "tsmultirange", 4534: "tstzmultirange", 4535: "datemultirange",
    4536: "int8multirange", 4600: "pg_brin_bloom_summary", 4601: "pg_brin_minmax_multi_summary",
    5017: "pg_mcv_list", 5038: "pg_snapshot", 5069: "xid8",
}
# fmt: on

# The field a bit of an interval's typmod stands for, from the largest to the smallest.
_INTERVAL_FIELDS = ((2, "year"), (1, "month"), (3, "day"), (10, "hour"), (11, "minute"))
_SECOND = 12
_INTERVAL_ALL = 0x7FFF
_INTERVAL_FULL_PRECISION = 0xFFFF


def describe_type(type_oid: int, typmod: int, notes: Mapping[int, TypeNote] | None = None) -> str:
    """A type as ``format_type(type_oid, typmod)`` writes it; ``type 16432`` if it is not known."""
    note = (notes or {}).get(type_oid)
    element = ELEMENT_OF_ARRAY.get(type_oid) or (note.element if note else 0)
    if element:
        return f"{describe_type(element, typmod, notes)}[]"
    if note is not None:
        return note.name
    if typmod >= 0 and type_oid in _WITH_TYPMOD:
        return _WITH_TYPMOD[type_oid](typmod)
    return _NAMES.get(type_oid, f"type {type_oid}")


def _length(name: str, header: int = 0) -> Callable[[int], str]:
    return lambda typmod: f"{name}({typmod - header})"


def _precision(name: str, zone: str) -> Callable[[int], str]:
    return lambda typmod: f"{name}({typmod}) {zone} time zone"


def _numeric(typmod: int) -> str:
    precision, scale = precision_and_scale(typmod)
    return f"numeric({precision},{scale})"


def _interval(typmod: int) -> str:
    fields, digits = typmod >> 16 & 0x7FFF, typmod & 0xFFFF
    precision = "" if digits == _INTERVAL_FULL_PRECISION else f"({digits})"
    if fields == _INTERVAL_ALL:
        return f"interval{precision}"
    named = [name for bit, name in _INTERVAL_FIELDS if fields >> bit & 1]
    if fields >> _SECOND & 1:
        named.append("second")
    span = named[0] if len(named) == 1 else f"{named[0]} to {named[-1]}"
    return f"interval {span}{precision}"


_WITH_TYPMOD: dict[int, Callable[[int], str]] = {
    1042: _length("character", 4),
    1043: _length("character varying", 4),
    1560: _length("bit"),
    1562: _length("bit varying"),
    1083: _precision("time", "without"),
    1266: _precision("time", "with"),
    1114: _precision("timestamp", "without"),
    1184: _precision("timestamp", "with"),
    1186: _interval,
    1700: _numeric,
}
