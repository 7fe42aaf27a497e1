"""Values: the text on the wire, and the JSON that a consumer sees."""

from __future__ import annotations

import json

import pytest

from tests import pgoutput
from tests.unit.decoding.frames import OID, Frame, inserts, record_of, table

pytestmark = pytest.mark.usefixtures("both_ways")

BIG = "123456789012345678901234567890.123456789"


@pytest.mark.parametrize(
    ("type_oid", "text", "expected"),
    [
        (16, "t", "true"),
        (16, "f", "false"),
        (20, "9223372036854775807", "9223372036854775807"),
        (20, "-9223372036854775808", "-9223372036854775808"),
        (21, "-1", "-1"),
        (23, "0", "0"),
        (26, "4000000000", "4000000000"),
        (1700, "9.99", "9.99"),
        (1700, "22.2200", "22.2200"),
        (1700, BIG, BIG),
        (1700, "NaN", '"NaN"'),
        (1700, "Infinity", '"Infinity"'),
        (1700, "-Infinity", '"-Infinity"'),
        (700, "1e+20", "1e+20"),
        (701, "-1.5e-07", "-1.5e-07"),
        (701, "NaN", '"NaN"'),
        (701, "-0", "-0"),
        (701, None, "null"),
    ],
)
def test_numbers_and_booleans_keep_every_digit(
    type_oid: int, text: str | None, expected: str
) -> None:
    assert record_of(type_oid, text) == expected


@pytest.mark.parametrize(
    ("type_oid", "text"),
    [
        (25, 'he said "no"'),
        (25, 'back\\slash \\" both'),
        (25, "line\nfeed\ttab\r\b\f"),
        (25, "".join(map(chr, range(1, 0x20)))),
        (25, "\x7f DEL, ünïcödé, 😀, \u2028"),
        (25, ""),
        (25, "null"),
        (1042, "ab  "),
        (17, "\\x000102"),
        (2950, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
        (869, "192.168.0.1/24"),
        (650, "10.0.0.0/8"),
        (829, "08:00:2b:01:02:03"),
        (142, '<a b="c">d</a>'),
        (3220, "16/B374D848"),
        (790, "$1,000.00"),
        (1082, "infinity"),
        (1082, "0044-03-15 BC"),
        (1083, "24:00:00"),
        (1266, "12:00:00+05:30"),
        (1186, "1 year 2 mons 3 days 04:05:06.789"),
        (1186, "-1 mons +3 days -04:05:06"),
        (3904, "[1,6)"),
        (3904, "empty"),
        (4451, "{[1,3),[5,8)}"),
        (600, "(1,2)"),
        (603, "(1,1),(0,0)"),
        (3614, "'a':1 'b':2"),
        (99999, '(1,"x ""y"", z")'),
        (99998, '"k"=>NULL, "a"=>"b"'),
        (99997, "[1,2,3]"),
        (99996, "Top.Science"),
    ],
)
def test_every_other_type_is_its_text(type_oid: int, text: str) -> None:
    assert json.loads(record_of(type_oid, text)) == text


def test_a_value_that_needs_escaping_leaves_its_neighbours_alone() -> None:
    texts = ["plain", 'a"b', None, "c\\d", "e\nf", "\x01", "ü"]
    rows = inserts(table(("v", 25)), [[text] for text in texts])
    assert [json.loads(str(row["record"]))["v"] for row in rows] == texts


@pytest.mark.parametrize("type_oid", [114, 3802])
@pytest.mark.parametrize(
    "text",
    [
        '{"a" :  1, "a":2}',
        '{\n  "x": [1, 2]\n}',
        "18446744073709551617123",
        "null",
        '"text"',
        r'"\ud800"',
    ],
)
def test_json_is_embedded_as_it_is(type_oid: int, text: str) -> None:
    assert record_of(type_oid, text) == text


@pytest.mark.parametrize(
    ("type_oid", "text", "expected"),
    [
        (1007, "{1,NULL,3}", "[1,null,3]"),
        (1007, "{{1,2},{3,4}}", "[[1,2],[3,4]]"),
        (1007, "{}", "[]"),
        (1007, "[0:2]={7,8,9}", "[7,8,9]"),
        (1007, "[-1:0][2:3]={{1,2},{3,4}}", "[[1,2],[3,4]]"),
        (1007, "{{{1}},{{2}}}", "[[[1]],[[2]]]"),
        (1000, "{t,f,NULL}", "[true,false,null]"),
        (1022, "{1.5,NaN,-Infinity}", '[1.5,"NaN","-Infinity"]'),
        (1231, "{1.10,NaN}", '[1.10,"NaN"]'),
        (
            1009,
            r'{"a,b","q\"x","back\\slash","","NULL",NULL,plain}',
            r'["a,b","q\"x","back\\slash","","NULL",null,"plain"]',
        ),
        (1009, '{"line\nfeed",ü}', '["line\\nfeed","ü"]'),
        (3807, r'{"{\"a\": 1}","null",NULL,5}', '[{"a": 1},null,null,5]'),
        (1020, "{(1,1),(0,0);(3,3),(2,2)}", '["(1,1),(0,0)","(3,3),(2,2)"]'),
        (1185, '{"2026-01-01 00:00:00+00",infinity}', '["2026-01-01T00:00:00Z","infinity"]'),
        (3905, '{"[1,3)",empty}', '["[1,3)","empty"]'),
    ],
)
def test_arrays_become_nested_json_arrays(type_oid: int, text: str, expected: str) -> None:
    assert record_of(type_oid, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,2",
        "{1,2",
        "{1,2}}",
        "{1,2}x",
        "{1,,2}",
        "{1,}",
        "{,}",
        "{{1,2},{3}}",
        "{1,{2}}",
        "{{1},2}",
        '{"1}',
        "{1 2}",
        '{1"2"}',
        "[0:1]={1,2,3}",
        "[0:1]={}",
        "[0:]={1,2}",
        "{{{{{{{1}}}}}}}",
        "{x}",
        "{{}}",
        "{1\\,2}",
    ],
)
def test_a_malformed_array_names_its_column_and_row(text: str) -> None:
    relation = table(("id", 23, True), ("numbers", 1007))
    frame = Frame()
    for number, value in enumerate(["{1}", "{2,3}", text]):
        frame.add(pgoutput.insert(OID, [str(number), value]), relation)
    good, also_good, error = frame.errors()
    assert (good, also_good) == (None, None)
    assert "16/100:2 of table public.things, column 'numbers'" in str(error)


@pytest.mark.parametrize(
    ("type_oid", "text"),
    [
        (16, "true"),
        (16, ""),
        (23, ""),
        (23, "12a"),
        (23, "007"),
        (23, "+1"),
        (23, "1\n"),
        (23, "1.5"),
        (1700, "1."),
        (1700, ".5"),
        (1700, "nan"),
        (701, "1e"),
        (701, "--1"),
        (114, ""),
        (23, b"\xff"),
    ],
)
def test_a_text_that_its_type_cannot_have_is_refused(type_oid: int, text: str | bytes) -> None:
    relation = table(("v", type_oid))
    frame = Frame().add(pgoutput.insert(OID, [None]), relation)
    frame.add(pgoutput.insert(OID, [text]), relation)
    good, error = frame.errors()
    assert good is None
    assert "16/100:1 of table public.things, column 'v'" in str(error)


@pytest.mark.parametrize(
    ("type_oid", "text"),
    [
        *((oid, "4111-1111-secret") for oid in (16, 21, 23, 20, 26, 700, 701, 1700)),
        *((oid, "{4111-1111-secret}") for oid in (1000, 1007, 1231)),
        (1007, "{4111-1111-secret"),
        (1009, '{"4111-1111-secret'),
        *((oid, b"4111-1111-secret\xff") for oid in (25, 114, 3802, 1009)),
    ],
)
def test_an_error_names_the_place_of_a_value_and_never_the_value(
    type_oid: int, text: str | bytes
) -> None:
    frame = Frame().add(pgoutput.insert(OID, [text]), table(("v", type_oid)))
    (error,) = frame.errors()
    assert "16/100:0 of table public.things, column 'v'" in str(error)
    assert "4111" not in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize("type_oid", [25, 3802, 1009, 99999])
@pytest.mark.parametrize("text", [b"\xff", b"a\xc3", b"\xed\xa0\x80"])
def test_text_that_is_not_utf8_is_refused_by_name(type_oid: int, text: bytes) -> None:
    # The second half of the cut character starts the next value: together they would be valid.
    relation = table(("v", type_oid))
    frame = Frame().add(pgoutput.insert(OID, ["{}"]), relation)
    frame.add(pgoutput.insert(OID, [text]), relation)
    frame.add(pgoutput.insert(OID, [b"\xbc"]), relation)
    good, *errors = frame.errors()
    assert good is None
    for number, error in enumerate(errors, 1):
        assert f"16/100:{number} of table public.things, column 'v': " in str(error)
        assert "this value is not UTF-8" in str(error)
