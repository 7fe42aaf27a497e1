"""Transaction annotations: which changes carry what, however they come and are cut."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.cursor import ORIGIN, Cursor
from cdc.decoding.annotations import AnnotationRun, carried_bytes
from cdc.errors import ProtocolError
from cdc.replication.spill.spill import Spill
from cdc.replication.spill.spilled_transaction import BatchLimits
from cdc.replication.transaction_assembler import TransactionAssembler
from cdc.replication.wire.annotations import TEXT_BYTES_MAX, AnnotationTracker
from cdc.replication.wire.seal import Sealer
from cdc.replication.wire.sealed import Sealed
from tests import pgoutput
from tests.examples import examples
from tests.unit.replication.annotated import carried, clear_annotation, set_annotation
from tests.unit.replication.streamed import block
from tests.wire_messages import ITEM, OWN, row, transaction, wire

ANN, BOB = b'{"user":"ann"}', b'{"user":"bob"}'
NOTE = pgoutput.logical_message("note", b"x")

Texts = dict[Cursor, bytes]
"""What each change carries that carries anything."""


def texts(batches: Sequence[Sealed]) -> Texts:
    found = {}
    for batch in batches:
        for r, text in zip(batch.raw.to_pylist(), carried(batch), strict=True):
            if text is not None:
                found[Cursor(r["commit_lsn"], r["commit_idx"])] = text
    return found


def of_transaction(*messages: bytes) -> dict[int, bytes]:
    """By number, what the changes of one transaction carry."""
    sealed = Sealer().seal(wire(ITEM, OWN, *transaction(100, *messages)))
    assert sealed is not None
    return {cursor.idx: text for cursor, text in texts([sealed]).items()}


def test_the_changes_behind_it_carry_an_annotation_and_it_takes_a_number() -> None:
    assert of_transaction(row(), set_annotation(ANN), row(), row()) == {2: ANN, 3: ANN}


def test_a_second_one_replaces_the_first_and_clear_ends_it() -> None:
    said = [set_annotation(ANN), row(), set_annotation(BOB), row(), clear_annotation(), row()]
    assert of_transaction(*said) == {2: ANN, 4: BOB}


@pytest.mark.parametrize("product", ["walbrook", "sequin"])
def test_both_products_prefixes_mean_the_same(product: str) -> None:
    verb = f"{product}:transaction_annotations"
    said = pgoutput.logical_message(f"{verb}.set", ANN)
    ended = pgoutput.logical_message(f"{verb}.clear", b"whatever")
    assert of_transaction(said, row(), ended, row()) == {2: ANN}


@pytest.mark.parametrize(
    "prefix",
    [
        "walbrook:transaction_annotations",
        "walbrook:transaction_annotations.sets",
        "walbrook:",
        "walbrook",
        "sequin:transaction_annotation.set",
        " walbrook:transaction_annotations.set",
        "WALBROOK:TRANSACTION_ANNOTATIONS.SET",
    ],
)
def test_another_prefix_is_an_ordinary_message(prefix: str) -> None:
    assert of_transaction(pgoutput.logical_message(prefix, ANN), row()) == {}


def test_every_kind_of_change_carries_it_other_messages_included() -> None:
    truncate = pgoutput.truncate([1, 1])
    said = [set_annotation(ANN), pgoutput.delete(1, key=["1"]), truncate, NOTE, row()]
    assert of_transaction(*said) == dict.fromkeys([2, 3, 4, 5, 6], ANN)


def test_nothing_carries_over_into_the_next_transaction() -> None:
    first, second = transaction(100, set_annotation(ANN), row()), transaction(200, row(), row())
    sealed = Sealer().seal(wire(ITEM, *first, *second))
    assert sealed is not None
    assert texts([sealed]) == {Cursor(100, 2): ANN}


def test_a_message_outside_transactions_neither_annotates_nor_is_annotated() -> None:
    loose = set_annotation(BOB, transactional=False)
    note = pgoutput.logical_message("note", b"", transactional=False, lsn=150)
    messages = [
        *transaction(100, set_annotation(ANN), row()),
        loose,
        note,
        *transaction(200, row()),
    ]
    for cut in range(1, len(messages)):
        sealer = Sealer()
        pieces = [sealer.seal(wire(ITEM, *messages[:cut])), sealer.seal(wire(*messages[cut:]))]
        assert texts([piece for piece in pieces if piece]) == {Cursor(100, 2): ANN}


def test_our_own_tables_between_annotated_rows_are_left_out() -> None:
    assert of_transaction(set_annotation(ANN), row(), row(9), row()) == {2: ANN, 5: ANN}


def test_an_annotation_below_the_resume_cursor_still_holds_above_it() -> None:
    messages = wire(ITEM, *transaction(100, set_annotation(ANN), row(), row(), row()))
    for resume in range(6):
        sealed = Sealer(resume=Cursor(100, resume)).seal(messages)
        found = {} if sealed is None else texts([sealed])
        assert found == {Cursor(100, idx): ANN for idx in range(max(2, resume), 5)}


def test_a_cut_at_any_place_changes_nothing() -> None:
    messages = [
        ITEM,
        *transaction(100, row(), set_annotation(ANN), row(), row(), clear_annotation(), row()),
        *transaction(200, row(), set_annotation(b"{"), row(), set_annotation(BOB), row(), NOTE),
        *transaction(300, row()),
    ]
    whole = Sealer().seal(wire(*messages))
    assert whole is not None
    for first, second in itertools.combinations(range(1, len(messages)), 2):
        sealer = Sealer()
        bounds = [0, first, second, len(messages)]
        pieces = [sealer.seal(wire(*messages[a:b])) for a, b in itertools.pairwise(bounds)]
        assert texts([piece for piece in pieces if piece]) == texts([whole])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"ann", "not JSON"),
        (b"NaN", "not JSON"),
        (b'"\xff"', "not JSON in UTF-8"),
        (b'"\\ud800"', "not JSON"),
        (b'{"a":"\n"}', "not JSON"),
        (b"[" * 2000 + b"]" * 2000, "not JSON"),
        (b'"' + b"x" * (TEXT_BYTES_MAX - 1) + b'"', "more than 8192 bytes"),
    ],
)
def test_a_message_that_is_no_annotation_ends_the_one_before_and_is_reported_once(
    content: bytes, why: str
) -> None:
    said = [set_annotation(ANN), row(), set_annotation(content), row(), set_annotation(BOB), row()]
    sealed = Sealer().seal(wire(ITEM, *transaction(100, *said)))
    assert sealed is not None
    assert texts([sealed]) == {Cursor(100, 2): ANN, Cursor(100, 6): BOB}
    (refused,) = sealed.refused
    assert refused.cursor == Cursor(100, 3)
    assert why in refused.why
    assert sealed.raw.num_rows == 6, "the message itself stays a row"


def test_a_refusal_below_the_resume_cursor_was_reported_before() -> None:
    messages = wire(ITEM, *transaction(100, set_annotation(b"{"), row()))
    sealed = Sealer(resume=Cursor(100, 1)).seal(messages)
    assert sealed is not None
    assert sealed.refused == ()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'"' + b"x" * (TEXT_BYTES_MAX - 2) + b'"', b'"' + b"x" * (TEXT_BYTES_MAX - 2) + b'"'),
        (b'{"n": 123456789012345678901234567890.10}', None),
        (b'{"a":1,"a":2}', None),
        (b"[]", None),
        (b'{\r\n\t"a": "\\n",\n"b": 1\n}\n', b'{  \t"a": "\\n", "b": 1 } '),
        ('{"ü":"\u2028"}'.encode(), None),
    ],
)
def test_a_text_is_kept_as_it_was_written_but_on_one_line(
    content: bytes, text: bytes | None
) -> None:
    assert of_transaction(set_annotation(content), row()) == {2: content if text is None else text}


def test_a_message_that_is_not_as_long_as_it_says_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="bytes long"):
        of_transaction(set_annotation(ANN)[:-1], row())


def test_messages_of_others_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError("a message was looked at")

    monkeypatch.setattr(AnnotationTracker, "_hear", never)
    notes = [pgoutput.logical_message("an outbox", b"x")] * 50
    sealed = Sealer().seal(wire(ITEM, *transaction(100, row(), *notes, row())))
    assert sealed is not None
    assert sealed.annotations == ()


Send = Callable[[Sequence[bytes]], list[bytes]]


def in_a_stream(messages: Sequence[bytes]) -> list[bytes]:
    """The transaction in blocks of two messages."""
    pairs = [messages[at : at + 2] for at in range(0, len(messages), 2)]
    blocks = [block(7, *pair, first=at == 0) for at, pair in enumerate(pairs)]
    return [*itertools.chain(*blocks), pgoutput.stream_commit(7, 100, 108, 0)]


def prepared(messages: Sequence[bytes]) -> list[bytes]:
    begin, end = pgoutput.begin_prepare(90, 7, "g"), pgoutput.prepare(90, 7, "g")
    return [begin, *messages, end, pgoutput.commit_prepared(100, 0, 7, "g")]


def whole(messages: Sequence[bytes]) -> list[bytes]:
    return transaction(100, *messages)


MESSAGES = [row(), row(), row(9), set_annotation(ANN), set_annotation(BOB), set_annotation(b"{")]


def taken(messages: Sequence[bytes], cuts: Sequence[int], resume: Cursor) -> list[Sealed]:
    bounds = sorted({0, len(messages), *(cut for cut in cuts if cut < len(messages))})
    with tempfile.TemporaryDirectory() as directory:
        limits = BatchLimits(rows=3)
        intake = TransactionAssembler(
            Sealer(resume=resume), Spill(Path(directory) / "spill"), limits
        )
        pieces = itertools.pairwise(bounds)
        return [batch for a, b in pieces for batch in intake.take(wire(*messages[a:b]))]


@settings(max_examples=examples(60), deadline=None)
@given(
    said=st.lists(st.sampled_from([*MESSAGES, clear_annotation(), NOTE]), min_size=1, max_size=14),
    send=st.sampled_from([whole, in_a_stream, prepared]),
    cuts=st.lists(st.integers(1, 50), max_size=6),
    resume=st.integers(0, 14),
)
def test_streamed_prepared_or_whole_and_however_cut_the_same_changes_carry_the_same(
    said: list[bytes], send: Send, cuts: list[int], resume: int
) -> None:
    start = Cursor(100, resume) if resume else ORIGIN
    before, behind = transaction(50, set_annotation(BOB), row()), transaction(200, row(), row())
    messages = [ITEM, *before, *send([ITEM, OWN, *said]), *behind]
    plain = [ITEM, OWN, *before, *transaction(100, *said), *behind]
    expected = Sealer(resume=start).seal(wire(*plain))
    assert expected is not None
    found = taken(messages, cuts, start)
    assert texts(found) == texts([expected])
    assert [refused for batch in found for refused in batch.refused] == list(expected.refused)


def test_rows_of_a_rolled_back_savepoint_are_not_counted_and_the_rest_keeps_its_annotation(
    tmp_path: Path,
) -> None:
    intake = TransactionAssembler(Sealer(), Spill(tmp_path))
    undone = [*block(7, row(), row(), first=False, sub=8), pgoutput.stream_abort(7, 8)]
    assert list(intake.take(wire(*block(7, ITEM, row()), *undone))) == []
    later = block(7, set_annotation(ANN), row(), first=False)
    found = intake.take(wire(*later, pgoutput.stream_commit(7, 100, 108, 0)))
    assert texts(list(found)) == {Cursor(100, 2): ANN}


def test_frames_of_a_streamed_transaction_under_one_annotation_are_one_run(tmp_path: Path) -> None:
    intake = TransactionAssembler(Sealer(), Spill(tmp_path))
    blocks = [block(7, ITEM, set_annotation(ANN), row()), *[block(7, row(), first=False)] * 3]
    assert [list(intake.take(wire(*one))) for one in blocks] == [[]] * 4
    (sealed,) = intake.take(wire(pgoutput.stream_commit(7, 100, 108, 0)))
    assert sealed.annotations == (AnnotationRun(1, 5, ANN),)


def test_a_large_text_on_many_rows_makes_several_batches_of_the_same_rows(tmp_path: Path) -> None:
    large = b'"' + b"x" * (TEXT_BYTES_MAX - 2) + b'"'
    messages = [row(), set_annotation(b"{"), set_annotation(large), *[row()] * 16_000]
    sealed = Sealer().seal(wire(ITEM, *transaction(100, *messages)))
    batches = list(
        TransactionAssembler(Sealer(), Spill(tmp_path)).take(
            wire(ITEM, *transaction(100, *messages))
        )
    )
    assert sealed is not None
    assert len(batches) == 4
    assert all(carried_bytes(one.annotations) <= (32 << 20) + len(large) for one in batches)
    assert all(one.high == other.first for one, other in itertools.pairwise(batches))
    assert [one.raw.num_rows for one in batches] == [3 + 4096, 4096, 4096, 3712]
    assert texts(batches) == texts([sealed])
    assert [len(one.refused) for one in batches] == [1, 0, 0, 0]
    assert all(one.schemas for one in batches)
