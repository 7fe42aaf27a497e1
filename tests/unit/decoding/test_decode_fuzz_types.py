"""Damage in a table with every family: a typed error, a row that says so, or a valid result."""

from __future__ import annotations

import json
import random
import time
import tracemalloc

import pyarrow as pa
import pytest

from cdc.decoding import decode_changes
from cdc.decoding.format import ValueFormat, Wanted
from cdc.decoding.typed import decode_tables
from cdc.errors import DecodeError
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.columns_of import column, outcomes
from tests.unit.decoding.damage import damaged, damaged_message
from tests.unit.decoding.everything import RELATION, ROWS
from tests.unit.decoding.frames import OID, Frame
from tests.unit.decoding.models import MODELS

SEED = 20260301
WANTED = Wanted(
    (ValueFormat(), ValueFormat("unix_microsecond", "string"), ValueFormat("postgres")),
    before=True,
)
FIRST, SECOND = ROWS
PAYLOADS = [
    pgoutput.insert(OID, FIRST),
    pgoutput.insert(OID, SECOND),
    pgoutput.update(OID, SECOND, old=FIRST),
    pgoutput.update(OID, [*FIRST[:-2], UNCHANGED, None], old=SECOND),
    pgoutput.delete(OID, old=SECOND),
]


def _check(frame: Frame) -> list[bool]:
    """Decode in every form: which rows were sound; a broken message is refused with its place."""
    changes = decode_changes(frame.batch(), frame.schemas, wanted=WANTED)
    changes.validate(full=True)
    for change in changes.to_pylist():
        assert (change["record"] is None) == (change["error"] is not None)
        for name, text in change.items():
            if name.split("~")[0] in ("record", "changes", "before", "record_pks") and text:
                json.loads(text)
    for table in decode_tables(frame.batch(), frame.schemas):
        table.rows.validate(full=True)
        record, error = table.rows.column("record"), table.rows.column("error")
        assert record.is_null().equals(error.is_valid())
    return [error is None for error in changes.column("error").to_pylist()]


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("part", range(2))
def test_a_damaged_message_of_all_types_is_refused_or_read(part: int) -> None:
    choice = random.Random(SEED + part)
    refused = misplaced = 0
    for _ in range(100):
        frame = Frame().add(PAYLOADS[0], RELATION)
        frame.add(damaged_message(choice.choice(PAYLOADS), choice), RELATION)
        try:
            _check(frame)
        except DecodeError as error:
            refused += 1
            misplaced += "16/100:1" not in str(error)
    assert misplaced == 0, f"seed {SEED + part}"
    assert refused > 5, f"seed {SEED + part}"


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("part", range(2))
def test_a_damaged_value_is_the_fault_of_its_row_alone(part: int) -> None:
    choice = random.Random(SEED + part)
    refused = 0
    for _ in range(10):
        frame, touched = Frame(), []
        for _ in range(10):
            values: list[str | bytes | None] = [*choice.choice(ROWS)]
            touched.append(choice.random() < 0.5)
            if touched[-1]:
                at = choice.randrange(len(values))
                values[at] = damaged(str(values[at]).encode(), choice)
            frame.add(
                choice.choice(
                    [
                        pgoutput.insert(OID, values),
                        pgoutput.update(OID, values, old=FIRST),
                        pgoutput.update(OID, SECOND, old=values),
                        pgoutput.delete(OID, old=values),
                    ]
                ),
                RELATION,
            )
        sound = _check(frame)
        assert all(good for good, bad in zip(sound, touched, strict=True) if not bad)
        refused += sound.count(False)
    assert refused > 5, f"seed {SEED + part}"


SIZE = 100_000
UNITS = ['"', "\\", "{", "(", ",", "9", "[1:1]", "1,", '"",', '\\"', '"=>"', "\x01", "-0", "ü"]
AROUND = [("", ""), ("{", "}"), ('{"', '"}'), ('("', '")'), ("(", ")"), ("0.", ""), ("[", "]")]


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_value_takes_linear_time(name: str) -> None:
    form, slowest = MODELS[name].form, 0.0
    for unit in UNITS:
        for opening, closing in AROUND:
            texts = column([opening + unit * (SIZE // len(unit)) + closing])
            started = time.process_time()
            outcomes(form, texts)
            slowest = max(slowest, time.process_time() - started)
    assert slowest < 1


TRACED_SIZE = 40_000  # every allocation of Python's is traced, which takes its time
ARROW_MAX, PYTHON_MAX = 30, 100
"""How many times its own size a value may need while it is decoded, in Arrow's memory and in
Python's."""


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_value_takes_bounded_memory(name: str) -> None:
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        for unit in ("\x01", '""', '"a",', "1,"):
            for opening, closing in (("", ""), ("{", '"a"}'), ("(", ")")):
                text = opening + unit * (TRACED_SIZE // len(unit)) + closing
                outcomes(MODELS[name].form, column([text]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert 0 < pool.max_memory() < ARROW_MAX * TRACED_SIZE
    assert peak < PYTHON_MAX * TRACED_SIZE
