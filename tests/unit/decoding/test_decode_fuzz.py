"""Damaged messages: an error that names its place, or a valid result; nothing else."""

from __future__ import annotations

import json
import random

import pytest

from cdc.decoding import decode_changes
from cdc.errors import DecodeError
from tests import pgoutput
from tests.pgoutput import UNCHANGED
from tests.unit.decoding.damage import damaged_message
from tests.unit.decoding.frames import OID, Frame, table

pytestmark = pytest.mark.usefixtures("both_ways")

SEED = 20260101
CASES, ALL_CASES = 5_000, 20_000  # a part; all of them are run by make chaos
RELATION = table(("id", 20, True), ("flag", 16), ("n", 1700), ("text", 25), ("list", 1007))
PAYLOADS = [
    pgoutput.insert(OID, ["1", "t", "1.5", 'a"b', "{1,2}"]),
    pgoutput.insert(OID, ["-7", None, None, "ü", None]),
    pgoutput.update(OID, ["2", "f", "NaN", UNCHANGED, "{}"]),
    pgoutput.update(OID, ["3", "t", "0", "x", "{{1},{2}}"], key=["2", None, None, None, None]),
    pgoutput.update(OID, ["3", "t", "0", UNCHANGED, None], old=["3", "f", "1", "long", "{3}"]),
    pgoutput.delete(OID, old=["3", "f", "1", "long", "{3}"]),
    pgoutput.truncate([OID]),
]


@pytest.mark.parametrize(
    ("part", "cases"),
    [(0, CASES), *(pytest.param(n, ALL_CASES // 4, marks=pytest.mark.chaos) for n in range(1, 5))],
)
def test_a_damaged_message_is_refused_or_read_as_valid_json(part: int, cases: int) -> None:
    choice = random.Random(SEED + part)
    refused = misplaced = 0
    for _ in range(cases):
        # Good neighbours on both sides: reading past the row's end would find sensible bytes.
        frame = Frame()
        for payload in (PAYLOADS[0], damaged_message(choice.choice(PAYLOADS), choice), PAYLOADS[1]):
            frame.add(payload, RELATION)
        try:
            changes = decode_changes(frame.batch().slice(1, 1), frame.schemas)
        except DecodeError as error:
            refused += 1
            misplaced += "16/100:1" not in str(error)
            continue
        changes.validate(full=True)
        for name in ("record", "changes", "record_pks", "unchanged"):
            text = changes.column(name)[0].as_py()
            if text is not None:
                json.loads(text)
    assert misplaced == 0
    assert cases // 2 < refused < cases
