"""Values of every built-in type, as texts that its input function reads: the usual and the odd.

A ``Case`` says of a type what our JSON makes of what ``to_json`` says, where the two differ on
purpose, and what its Arrow value is by the server's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from tests.exact_json import Json, Number, parse


def same(value: Json) -> Json:
    return value


def zulu(value: Json) -> Json:
    """UTC is Z, as most JSON has it; ``to_json`` says +00:00."""
    return value.replace("+00:00", "Z") if isinstance(value, str) else value


def unquoted(value: Json) -> Json:
    """An oid is a number; ``to_json`` quotes all but its own six number types."""
    return Number(value) if isinstance(value, str) else value


def embedded(value: Json) -> Json:
    """A vector is an array of numbers; ``to_json`` has its text."""
    return parse(value) if isinstance(value, str) else value


def spaced(value: Json) -> Json:
    """An int2vector is its text; to ``to_json`` it is an array."""
    if not isinstance(value, list):
        return value
    return " ".join(one if isinstance(one, str) else one.text for one in value)


@dataclass(frozen=True)
class Case:
    """A type, its values, and what they become."""

    type: str
    values: tuple[str, ...]
    ours: Callable[[Json], Json] = same  # of what to_json says
    sql: str = "format('%s', v)"  # what the server says of which the Arrow value is made
    python: Callable[[str], object] = str
    beyond: tuple[str, ...] = ()  # exact in JSON, but no value of the Arrow type
    delimiter: str = ","
    needs: str = ""  # an extension


def text(type_: str, *values: str, delimiter: str = ",", needs: str = "") -> Case:
    """A type that is its text."""
    return Case(type_, values, delimiter=delimiter, needs=needs)


def exact_float(number: str) -> object:
    return repr(float(number))  # tells -0.0 from 0.0, and NaN is equal to itself


_FINITE = "CASE WHEN isfinite(v) THEN {} WHEN v = 'infinity' THEN {} ELSE {} END"
_DAYS = _FINITE.format("v - date '1970-01-01'", 2**31 - 1, -(2**31))
_MICROSECONDS = _FINITE.format("trunc(extract(epoch FROM v) * 1000000)", 2**63 - 1, -(2**63))


def _decimal(type_: str, *values: str, beyond: tuple[str, ...] = ()) -> Case:
    return Case(type_, values, python=Decimal, beyond=beyond)


def _timestamp(type_: str, *values: str) -> Case:
    last = ("294276-12-31 23:59:59.999999", "294247-01-10 04:00:54.775807")
    return Case(type_, values, zulu, _MICROSECONDS, int, last if len(values) > 5 else ())


_NINES = "9" * 39
_MOMENTS = (
    *("2026-01-01 00:00:00", "2024-02-29 23:59:59.999999", "1969-12-31 23:59:59.5"),
    *("infinity", "-infinity", "0044-03-15 12:00:00 BC", "4713-11-24 00:00:00 BC"),
    *("4713-12-31 23:59:59.999999 BC", "0001-01-01 00:00:00", "0001-12-31 23:59:59.000001 BC"),
    *("9999-12-31 23:59:59.999999", "10000-01-01 00:00:00", "21016-03-05 00:00:00.000001"),
    "294246-12-31 23:59:59",
)
_ROUNDED = ("2026-01-01 00:00:00.123456", "infinity", "1900-01-01 23:59:59.999999")

NUMBERS = [
    Case("bool", ("t", "f"), python=lambda said: said == "t"),
    Case("int2", ("0", "-32768", "32767"), python=int),
    Case("int4", ("-0", "-2147483648", "2147483647"), python=int),
    Case("int8", ("7", "-9223372036854775808", "9223372036854775807"), python=int),
    Case("oid", ("0", "4000000000", "4294967295"), unquoted, python=int),
    Case(
        "float4",
        (
            *("0.1", "-0", "0", "1e-45", "1.1754944e-38", "3.4028235e38", "1e15", "1e-7"),
            *("NaN", "Infinity", "-Infinity", "16777217"),
        ),
        sql="v::float8::text",
        python=exact_float,
    ),
    Case(
        "float8",
        (
            *("0.1", "-0", "0", "1e-320", "5e-324", "2.2250738585072014e-308", "1e20", "-1.5e-07"),
            *("1.7976931348623157e308", "NaN", "Infinity", "-Infinity", "9007199254740993"),
        ),
        python=exact_float,
    ),
    text("numeric", "22.2200", "0", "-0.000", _NINES, f"-{_NINES}.{_NINES}", "9" * 1000, "1e-1000"),
    text("numeric", "NaN", "Infinity", "-Infinity", "1e1000", "1.10", f"0.{'7' * 16383}"),
    _decimal("numeric(10,4)", "22.22", "-0.0001", "999999.9999", "0", beyond=("NaN",)),
    _decimal("numeric(38,0)", "9" * 38, "-" + "9" * 38, "1"),
    _decimal("numeric(38,38)", "0." + "9" * 38, "-0." + "0" * 37 + "1"),
    _decimal("numeric(3,-2)", "99900", "-100", "0"),
    _decimal("numeric(2,5)", "0.00099", "-0.00001", "0"),
    text("numeric(38,-1)", "10", "9" * 38 + "0"),
    text("numeric(39,1)", "9" * 38 + ".9", "-0.1", "NaN"),
    text("numeric(1000,900)", "9" * 100 + "." + "9" * 900, "0"),
    text("money", "12.34", "-1234567.89", "-92233720368547758.08", "92233720368547758.07"),
]

TEXTS = [
    text(
        "text",
        *("plain", "", " ", "null", "NULL", 'he said "no"', "back\\slash", "a,b;c", "{}", "(,)"),
        *(
            "".join(map(chr, range(1, 0x20))),
            "\x7f\x80\u2028\u2029\ufeff",
            "😀 e\u0301 𝒳",
            "\\u0041",
        ),
        *("'", "\\\\", '\\"', '""', "\ufffd\uffff\U0010ffff", "x" * 10_000, "\n", "[1:2]={1,2}"),
    ),
    text("varchar(5)", "ab", "", "üüüüü", "a b  "),
    text("varchar", "x" * 300, 'q"'),
    text("char(4)", "ab", "", "a,b", "😀"),
    text("name", "some_name", "", "x" * 63, 'q"\\'),
    text('"char"', "a", "", '"', "\\", ",", " "),
    Case(
        "bytea",
        ("\\x", "\\x00", "\\x000102", "\\x" + bytes(range(256)).hex(), "\\xdeadBEEF"),
        sql="encode(v, 'hex')",
        python=bytes.fromhex,
    ),
    text("uuid", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "0" * 32),
]

DOCUMENTS = [
    text(
        "json",
        *('{"a" :  1, "a":2}', '{\n  "x": [1, 2]\n}', "null", '"text"', "18446744073709551617123"),
        *('"\\u00e9\\n\\""', "[]", "{}", '{"k": "a,b \\\\ \\"q\\""}', "1e400", "-0.0", " 1 "),
    ),
    text(
        "jsonb",
        *('{"b": 1, "a": [null, true]}', "null", '"text"', "18446744073709551617", "1.10", "[]"),
        *('"\\u00e9\\n\\"\\u0001"', "1e100", '{"k": "a,b \\\\ \\"q\\"", "": {}}', "-0", '"\u2028"'),
    ),
    text("jsonpath", "$.a[*] ? (@ > 1)", '$."q\\"x"'),
    text("xml", '<a b="c">d &amp; e</a>', "<x/>", "text"),
    text("tsvector", "a:1 b:2A", "'it''s' 'q\"x' 'back\\\\slash'", ""),
    text("tsquery", "a & !b | c", "'it''s' <-> 'x y'", ""),
]

TIMES = [
    Case(
        "date",
        (
            *("2026-01-01", "2024-02-29", "1900-02-28", "2000-02-29", "1969-12-31", "infinity"),
            *("-infinity", "0044-03-15 BC", "4714-11-24 BC", "0001-01-01", "0001-12-31 BC"),
            *("9999-12-31", "10000-01-01", "294277-01-01", "5874897-12-31", "0005-02-29 BC"),
        ),
        sql=_DAYS,
        python=int,
    ),
    _timestamp("timestamp", *_MOMENTS),
    _timestamp(
        "timestamptz",
        *_MOMENTS,
        "2026-06-30 12:00:00.5+05:30",
        "1883-11-18 12:00:00.000001-04:56:02",
    ),
    _timestamp("timestamp(0)", *_ROUNDED),
    _timestamp("timestamptz(3)", *_ROUNDED),
    text("time", "00:00:00", "24:00:00", "23:59:59.999999", "12:00"),
    text("time(3)", "23:59:59.999999", "04:05:06.7"),
    text("timetz", "12:00:00+05:30", "24:00:00-12", "00:00:00.000001+15:59:59", "10:00Z"),
    text(
        "interval",
        *("1 year 2 mons 3 days 04:05:06.789", "-1 mons +3 days -04:05:06", "0", "1 month"),
        *("-0.000001 seconds", "178000000 years", "2147483647 days", "-1 year 1 day"),
    ),
    text("interval(2)", "1.239 seconds"),
]

PLACES = [
    text("inet", "192.168.0.1/24", "10.0.0.1", "::1", "2001:db8::ff/64", "::ffff:1.2.3.4"),
    text("cidr", "10.0.0.0/8", "2001:db8::/32", "1.2.3.4"),
    text("macaddr", "08:00:2B:01:02:03"),
    text("macaddr8", "08:00:2b:01:02:03:04:05", "08:00:2b:01:02:03"),
    text("bit(3)", "101", "000"),
    text("bit", "1"),
    text("varbit", "", "1", "0101" * 50),
    text("varbit(5)", "10101", ""),
    text("point", "(1,2)", "(-0,1e-320)", "(NaN,Infinity)"),
    text("line", "{1,-1,0}", "{0.1,1,2}"),
    text("lseg", "[(1,2),(3,4)]"),
    text("box", "(1,1),(0,0)", "(0.1,Infinity),(-1e300,-Infinity)", delimiter=";"),
    text("path", "((1,2),(3,4))", "[(0,0),(1,1),(2,0)]"),
    text("polygon", "((0,0),(1,1),(2,0))"),
    text("circle", "<(1,2),3>", "<(0,0),0>"),
]

CATALOG = [
    text("regclass", "pg_class", "pg_catalog.pg_type", "-"),
    text("regtype", "int4", "text[]", '"char"'),
    text("regproc", "now", "-"),
    text("regprocedure", "abs(int4)", "lower(text)"),
    text("regoper", "||/"),
    text("regoperator", "+(int4,int4)"),
    text("regconfig", "english", "simple"),
    text("regdictionary", "simple"),
    text("regnamespace", "pg_catalog", '"information_schema"'),
    text("regrole", "pg_monitor"),
    text("regcollation", '"C"', '"POSIX"'),
    text("xid", "0", "4294967295"),
    text("xid8", "0", "18446744073709551615"),
    text("cid", "7"),
    text("tid", "(4294967295,65535)", "(0,1)"),
    text("pg_lsn", "0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"),
    text("pg_snapshot", "10:20:10,14,15", "10:10:"),
    text("txid_snapshot", "10:20:10,14,15"),
    text("refcursor", "my cursor", '"'),
    Case("int2vector", ("1 2", "-32768", ""), spaced),
    Case("oidvector", ("1 4000000000", ""), spaced),
]

RANGES = [
    text("int4range", "[1,5]", "empty", "(,)", "[,3)", "(1,)"),
    text("int8range", "[-9223372036854775808,9223372036854775807)"),
    text("numrange", "[1.10,2.200]", "(NaN,)", "empty"),
    text("daterange", "[2026-01-01,infinity)", "[,0044-03-15 BC]"),
    text("tsrange", '["2026-01-01 00:00:00.5","2026-01-02 00:00"]', "(-infinity,)"),
    text("tstzrange", '["2026-01-01 00:00+05:30",infinity]', "empty"),
    text("int4multirange", "{[1,3),[5,8)}", "{}"),
    text("int8multirange", "{(,)}"),
    text("nummultirange", "{[1.10,2.200],(5,)}"),
    text("datemultirange", "{[2026-01-01,2026-01-03)}"),
    text("tsmultirange", '{["2026-01-01 00:00:00.5","2026-01-02 00:00"]}', "{}"),
    text("tstzmultirange", '{["2026-01-01 00:00+00",infinity]}'),
]
