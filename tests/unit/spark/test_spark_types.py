"""What a type is called in Spark is what Spark makes of its Arrow type."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.java_gateway import launch_gateway
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import DataType, _parse_datatype_json_string

from cdc.decoding.catalog import TypeNote
from cdc.decoding.types import TypeForm, type_form
from cdc.decoding.types.builtin import ELEMENT_OF_ARRAY, NUMERIC_OID, RICHER
from tests.unit.decoding.models import MODELS

_HOSTILE = ("a`b", 'c"d', "select", "e f", "😀", "x:y,z<int>", "UPPER", "")

FORMS: dict[str, TypeForm] = {
    **{name: model.form for name, model in MODELS.items()},
    **{str(oid): form for oid, form in RICHER.items()},
    **{str(oid): type_form(oid) for oid in ELEMENT_OF_ARRAY},
    **{f"{oid}[][]": type_form(oid, dimensions=2) for oid in (1007, 1185)},
    **{
        f"numeric({precision},{scale})": type_form(
            NUMERIC_OID, (precision << 16 | (scale & 0x7FF)) + 4
        )
        for precision, scale in ((1, 0), (38, 38), (38, 0), (39, 0), (5, -5), (3, 9), (1000, -1000))
    },
    "hostile names": type_form(
        1,
        notes={
            1: TypeNote(1, "t", "c", fields=tuple((f"{n}_", 1184, -1) for n in _HOSTILE)),
        },
    ),
}


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    """Spark's own parser, in a JVM of its own: the session of another test must not inherit it."""
    gateway = launch_gateway()  # type: ignore[no-untyped-call]
    try:
        yield gateway.jvm.org.apache.spark.sql.types.DataType
    finally:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=30)


def test_every_type_has_the_name_that_spark_gives_its_arrow_type(parser: Any) -> None:
    named = {name: _parsed(parser, form.spark) for name, form in FORMS.items()}
    assert named == {name: from_arrow_type(form.arrow) for name, form in FORMS.items()}


def _parsed(parser: Any, ddl: str) -> DataType:
    words: str = parser.fromDDL(f"v {ddl}").json()
    (column,) = json.loads(words)["fields"]
    return _parse_datatype_json_string(json.dumps(column["type"]))
