"""A table with a column of every family, types of its own among them, and rows of it.

json is not in it: it is taken at Postgres' word, so a damaged one is damaged in the record too.
"""

from __future__ import annotations

from cdc.decoding.catalog import CatalogNote, TypeNote
from cdc.decoding.relation import with_catalog
from tests import pgoutput
from tests.unit.decoding.frames import OID

_TYPMOD_10_2 = (10 << 16 | 2) + 4

NOTE = CatalogNote(
    key=("id",),
    attnums=tuple(range(1, 19)),
    dimensions=(0,) * 10 + (1, 1, 0, 1, 0, 0, 0, 2),
    types={
        note.oid: note
        for note in (
            TypeNote(20001, "pair", "c", fields=(("a", 23, -1), ('b"', 25, -1))),
            TypeNote(20002, "_pair", "b", element=20001),
            TypeNote(20003, "hstore", "b", extension="hstore"),
            TypeNote(20004, "vector", "b", extension="vector"),
            TypeNote(20005, "price", "d", base=1700, typmod=_TYPMOD_10_2),
            TypeNote(20006, "mood", "e"),
            TypeNote(
                20007,
                "deep",
                "c",
                fields=(("p", 20001, -1), ("ps", 20002, -1), ("t", 1184, -1), ("h", 20003, -1)),
            ),
        )
    },
)
COLUMNS: list[pgoutput.ColumnSpec] = [
    ("id", 20, True),
    ("flag", 16),
    ("f", 701),
    ("n", 1700),
    ("text", 25),
    ("data", 17),
    ("day", 1082),
    ("at", 1184),
    ("local", 1114),
    ("price", 20005),
    ("ids", 1007),
    ("texts", 1009),
    ("pair", 20001),
    ("pairs", 20002),
    ("tags", 20003),
    ("vec", 20004),
    ("deep", 20007),
    ("grid", 1007),
]
BARE = pgoutput.relation(OID, "public", "things", COLUMNS, identity="f")
RELATION = with_catalog(BARE, NOTE)
ROWS: list[list[str]] = [
    [
        *("1", "t", "1.5", "1.50", 'a"b', "\\x00ff", "2026-01-01", "2026-01-01 00:00:00+00"),
        *("2026-01-01 00:00:00.5", "9.99", "{1,2}", "{a,NULL}", "(1,x)", '{"(1,x)",NULL}'),
        *('"k"=>"v", "n"=>NULL', "[1,2.5]", "(,,,)", "{{1,2},{3,4}}"),
    ],
    [
        *("-7", "f", "NaN", "NaN", "ü\\\n", "\\x", "infinity", "0044-03-15 12:00:00+00 BC"),
        *("21016-01-01 00:00:00", "-0.10", "[0:1]={7,NULL}", '{"a,b","q\\"x",""}', '(,"x ""y""")'),
        *("{}", "", "[1e-45]"),
        '("(1,""a b"")","{""(2,)""}","2026-01-01 00:00:00+00","""k""=>""v""")',
        "{}",
    ],
]
