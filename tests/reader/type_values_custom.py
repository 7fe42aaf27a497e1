"""Values of types that somebody made: enums, domains, composites, ranges, extensions' types."""

from __future__ import annotations

from decimal import Decimal

from tests.exact_json import Json, Object, as_values, parse
from tests.reader.type_values import Case, embedded, exact_float, same, text, unquoted, zulu

SETUP = r"""
CREATE TYPE mood AS ENUM ('happy', 'so so', 'q"\,{}()', 'NULL', '😀');
CREATE TYPE floatrange AS RANGE (subtype = float8, multirange_type_name = floatranges);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN price AS numeric(10,2);
CREATE DOMAIN label AS text;
CREATE DOMAIN tags AS text[];
CREATE DOMAIN grid AS int[][];
CREATE DOMAIN pricier AS price CHECK (VALUE > 1);
CREATE DOMAIN corners AS box;
CREATE DOMAIN moment AS timestamptz(3);
CREATE TYPE pair AS (a int, "b ""c\" text);
CREATE DOMAIN paired AS pair;
CREATE TYPE deep AS (
    p pair, ps pair[], d pricier, m mood, t timestamptz, j jsonb, n numeric, "select" tags, o oid
);
CREATE TYPE single AS (v text);
CREATE TYPE fieldless AS ();
CREATE TYPE base_type;
CREATE FUNCTION base_in(cstring) RETURNS base_type LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION base_out(base_type) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE TYPE base_type (INPUT = base_in, OUTPUT = base_out, LIKE = text);
CREATE TYPE bar_type;
CREATE FUNCTION bar_in(cstring) RETURNS bar_type LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION bar_out(bar_type) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE TYPE bar_type (INPUT = bar_in, OUTPUT = bar_out, LIKE = text, DELIMITER = '|');
"""

_DEEP = (
    r'("(1,""x \\""\\""y, z"")","{""(2,)"",NULL,""(,\\""\\"")""}",1.10,"so so",'
    r'"2026-01-01 00:00:00.5+00","{""k"": [null, 1.50]}",NaN,"{a,\"b c\",NULL}",4000000000)'
)


def _pairs(said: str) -> object:
    """hstore as its cast to json has it; a map is the list of its pairs."""
    return sorted(parse(said).members)


def _floats(said: str) -> object:
    return [exact_float(number) for number in said.strip("{}").split(",")]


def _vector(type_: str, *values: str) -> Case:
    # By way of real[], which says of each number exactly which float it is.
    return Case(type_, values, embedded, "v::real[]::float8[]::text", _floats, needs="vector")


def _values(said: str) -> object:
    return as_values(parse(said))


def _deep_json(value: Json) -> Json:
    """The oid in it is a number, the timestamp ends with Z."""
    if not isinstance(value, Object):
        return value
    own = {"t": zulu, "o": unquoted}
    return Object(tuple((name, own.get(name, same)(member)) for name, member in value.members))


def _deep_typed(said: str) -> object:
    """The timestamp in microseconds, the jsonb and the numeric as text."""
    fields = as_values(parse(said))
    if fields["t"] is not None:
        fields |= {"t": 1767225600500000, "j": '{"k": [null, 1.50]}', "o": 4000000000}
    return fields


CUSTOM = [
    text("mood", "happy", "so so", 'q"\\,{}()', "NULL", "😀"),
    text("floatrange", "[1.5,2)", "empty", "(-Infinity,NaN]"),
    text("floatranges", "{[1.5,2),(3,)}", "{}"),
    Case("positive", ("5", "2147483647"), python=int),
    Case("price", ("9.99", "-0.10", "12345678.90"), python=Decimal, beyond=("NaN",)),
    Case("pricier", ("9.99", "1.1"), python=Decimal),
    text("label", "x", 'q"\\', "", "NULL"),
    text("corners", "(1,1),(0,0)", delimiter=";"),
    Case(
        "moment",
        ("2026-01-01 00:00:00.1239+00", "infinity"),
        zulu,
        f"CASE WHEN isfinite(v) THEN trunc(extract(epoch FROM v) * 1000000) ELSE {2**63 - 1} END",
        int,
    ),
    text("base_type", "anything", 'q"\\', ""),
    text("bar_type", "anything", "a|b", "a,b", "", delimiter="|"),
    Case(
        "pair",
        (r'(1,"x ""y"", \\ z")', "(,)", '(,"")', "(-5,NULL)", "(7,plain)", '(,"a,(b)")', '(1," ")'),
        sql="to_json(v)::text",
        python=_values,
    ),
    Case("paired", ('(1,"x y")', "(,)"), sql="to_json(v)::text", python=_values),
    Case("single", ("()", '("")', "(x)", '("(,)")'), sql="to_json(v)::text", python=_values),
    Case("fieldless", ("()",), sql="to_json(v)::text", python=lambda _: "()"),
    Case("deep", (_DEEP, "(,,,,,,,,)"), _deep_json, "to_json(v)::text", _deep_typed),
    Case("tags", ("{}", "{a,NULL}", '{"a,b","","NULL"}'), sql="to_json(v)::text", python=_values),
    Case(
        "grid",
        ("{}", "{{1,2},{3,NULL}}", "[0:0][2:2]={{1}}"),
        sql="to_json(v)::text",
        python=_values,
    ),
]


VECTORS = [
    _vector("vector", "[1,2,3]", "[0.1,-0,1e-45,3.4028235e38]", "[1e-7]"),
    _vector("vector(2)", "[1.5,-2]"),
    _vector("halfvec", "[1,2.5,-0]", "[65504,6e-8,0.1]"),
    text("sparsevec", "{1:1.5,3:2}/5", "{}/3", needs="vector"),
]

CONTRIB = [
    Case(
        "hstore",
        ("", "a=>1", '"k"=>NULL, "a b"=>"c\\"d\\\\e", ""=>"", "NULL"=>"NULL"', "k=>v, ü=>'=>'"),
        sql="to_json(v)::text",
        python=_pairs,
        needs="hstore",
    ),
    text("citext", "Some Text", "", 'q"\\', needs="citext"),
    text("ltree", "Top.Science.Astronomy", "", needs="ltree"),
    text("lquery", "*.foo|bar.*{1,2}", needs="ltree"),
    text("ltxtquery", "Europe & Russia*@ & !Transportation", needs="ltree"),
    text("isbn13", "978-0-393-04002-9", needs="isn"),
    text("ean13", "978-0-393-04002-9", needs="isn"),
    text("cube", "(1,2),(3,4)", "(0)", needs="cube"),
    text("seg", "1.5 .. 2.50", "<3", needs="seg"),
    Case("lo", ("4000000000",), unquoted, python=int, needs="lo"),
]
