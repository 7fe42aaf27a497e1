"""The types that every Postgres has, by their numbers, which never change."""

from __future__ import annotations

from cdc.decoding.types.binary import BYTEA
from cdc.decoding.types.boolean import BOOLEAN
from cdc.decoding.types.decimal import FLOAT4, FLOAT8
from cdc.decoding.types.form import TypeForm
from cdc.decoding.types.integer import INT2, INT4, INT8, OID
from cdc.decoding.types.json import JSON
from cdc.decoding.types.temporal import DATE, TIMESTAMP, TIMESTAMPTZ

NUMERIC_OID = 1700
BOX_OID = 603  # the one built-in type whose arrays are delimited by semicolons

RICHER: dict[int, TypeForm] = {
    16: BOOLEAN,
    17: BYTEA,
    20: INT8,
    21: INT2,
    23: INT4,
    26: OID,
    114: JSON,
    700: FLOAT4,
    701: FLOAT8,
    1082: DATE,
    1114: TIMESTAMP,
    1184: TIMESTAMPTZ,
    3802: JSON,
}
"""Built-in types that are more than their text; numeric too, which depends on its precision."""

# fmt: off
ELEMENT_OF_ARRAY = {
    # bool, bytea, char, name, integers, text, json, xml
    1000: 16, 1001: 17, 1002: 18, 1003: 19, 1016: 20, 1005: 21, 1006: 22, 1007: 23, 1009: 25,
    199: 114, 3807: 3802, 4073: 4072, 143: 142, 1014: 1042, 1015: 1043, 1263: 2275,
    # oid and its aliases, transaction ids
    1028: 26, 1008: 24, 1010: 27, 1011: 28, 1012: 29, 1013: 30, 271: 5069, 2207: 2202,
    2208: 2203, 2209: 2204, 2210: 2205, 2211: 2206, 4192: 4191, 4097: 4096, 4090: 4089,
    3735: 3734, 3770: 3769, 2949: 2970, 5039: 5038, 3221: 3220, 1034: 1033, 2201: 1790,
    # point, lseg, path, box, polygon, line, circle
    1017: 600, 1018: 601, 1019: 602, 1020: 603, 1027: 604, 629: 628, 719: 718,
    # floats, numeric, money
    1021: 700, 1022: 701, 1231: 1700, 791: 790,
    # network addresses, bit strings, uuid, text search
    1040: 829, 775: 774, 1041: 869, 651: 650, 1561: 1560, 1563: 1562, 2951: 2950, 3643: 3614,
    3644: 3642, 3645: 3615,
    # dates and times
    1182: 1082, 1183: 1083, 1115: 1114, 1185: 1184, 1187: 1186, 1270: 1266,
    # ranges and multiranges, records
    3905: 3904, 3907: 3906, 3909: 3908, 3911: 3910, 3913: 3912, 3927: 3926, 6150: 4451,
    6151: 4532, 6152: 4533, 6153: 4534, 6155: 4535, 6157: 4536, 2287: 2249,
}
"""Array type → type of its elements. int2vector and oidvector are texts of their own."""
# fmt: on

_FIRST_UNPINNED = 10_000


def is_builtin(type_oid: int) -> bool:
    """Whether the number says all; types above were numbered by the server that has them."""
    return type_oid < _FIRST_UNPINNED
