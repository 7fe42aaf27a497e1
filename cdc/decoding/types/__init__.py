"""The JSON form of every Postgres type: a registry by type OID, one module a family.

OIDs of built-in types never change. A type that is not here (an enum, a domain, a composite, an
extension's) is its text as a JSON string.
"""

from __future__ import annotations

from cdc.decoding.types.array import array_of
from cdc.decoding.types.boolean import boolean_json
from cdc.decoding.types.form import Family, JsonColumn
from cdc.decoding.types.json import embedded_json
from cdc.decoding.types.number import integer_json, number_json
from cdc.decoding.types.text import text_json

__all__ = ["Family", "JsonColumn", "family_of", "text_json"]

_SCALARS: dict[int, Family] = {
    16: boolean_json,
    20: integer_json,  # int8
    21: integer_json,  # int2
    23: integer_json,  # int4
    26: integer_json,  # oid
    700: number_json,  # float4
    701: number_json,  # float8
    1700: number_json,  # numeric
    114: embedded_json,  # json
    3802: embedded_json,  # jsonb
}

# fmt: off
_ELEMENT_OF_ARRAY = {
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
# fmt: on

_BOX = 603  # the one built-in type whose arrays are delimited by semicolons

_ARRAYS: dict[int, Family] = {
    array: array_of(_SCALARS.get(element, text_json), ";" if element == _BOX else ",")
    for array, element in _ELEMENT_OF_ARRAY.items()
}


def family_of(type_oid: int) -> Family:
    """How values of this type become JSON."""
    return _SCALARS.get(type_oid) or _ARRAYS.get(type_oid) or text_json


def element_of_array(type_oid: int) -> int | None:
    """The type of the elements of a built-in array type; None for every other type."""
    return _ELEMENT_OF_ARRAY.get(type_oid)
