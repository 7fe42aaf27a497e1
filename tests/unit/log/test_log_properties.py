"""Whatever happens to the files: never wrong data, never a skipped batch, never in silence."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cdc.cursor import ORIGIN, Cursor
from cdc.errors import CorruptionError
from cdc.log.manifest import FILE_NAME
from cdc.log.recovery import recover
from cdc.log.sync import read_durable
from cdc.log.view import LogView
from cdc.log.writer import LogWriter, SegmentLimits
from tests.examples import examples
from tests.unit.log.batches import (
    KEEP_NONE,
    active_data,
    active_index,
    append,
    crash,
    healed,
    lsns,
    manifest_of,
)

LIMITS = SegmentLimits(bytes=2_500)


class LogUnderDamage(RuleBasedStateMachine):
    """A log, and beside it the list of what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.term = 0
        self.lsn = 10
        self.expected: list[int] = []
        self.log = self.opened()
        self.history = self.log.manifest.history

    def opened(self) -> LogWriter:
        return LogWriter(self.directory, term=self.term, durability="memory", limits=LIMITS)

    def teardown(self) -> None:
        self.log.close()
        shutil.rmtree(self.directory)

    @rule(count=st.integers(1, 4), size=st.integers(0, 400))
    def append(self, count: int, size: int) -> None:
        self.lsn += 1
        append(self.log, self.lsn, count, size)
        self.expected.append(self.lsn)

    @rule()
    def seal(self) -> None:
        self.log._seal()

    @precondition(lambda self: self.expected)
    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        lsn = self.expected[int(share * (len(self.expected) - 1))]
        self.log.retain(Cursor(lsn, 0), KEEP_NONE)
        floor = self.log.manifest.earliest
        assert floor <= Cursor(lsn, 0)
        self.expected = [one for one in self.expected if Cursor(one, 0) >= floor]

    @rule(newer=st.booleans(), well=st.booleans())
    def reopen(self, newer: bool, well: bool) -> None:
        self.end_writer(well)
        self.term += newer
        self.log = self.opened()
        assert self.log.manifest.history == self.history, "nothing was lost"

    @rule(
        newer=st.booleans(),
        well=st.booleans(),
        choice=st.floats(0, 1, exclude_max=True),
        place=st.floats(0, 1, exclude_max=True),
        bit=st.integers(-1, 7),
        heal=st.booleans(),
    )
    def damage_and_reopen(
        self, newer: bool, well: bool, choice: float, place: float, bit: int, heal: bool
    ) -> None:
        """Flip a bit of any file, or (-1) cut it off, and see what is made of it."""
        self.end_writer(well)
        files = [path for path in sorted(self.directory.iterdir()) if path.stat().st_size]
        path = files[int(choice * len(files))]
        is_active = path in (active_data(self.directory), active_index(self.directory))
        original = path.read_bytes()
        at = int(place * len(original))
        damaged = bytearray(original[:at] if bit < 0 else original)
        if bit >= 0:
            damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        self.term += newer
        synced = read_durable(self.directory) if path.name != "durable" else ORIGIN
        try:
            self.log = self.opened()
        except CorruptionError:
            assert path.name == FILE_NAME or path.suffix == ".seg"
            assert not is_active or synced > Cursor(self.expected[0], 0), "only what was on disk"
            path.write_bytes(original)
            self.log = self.opened()
            return
        assert path.name != FILE_NAME
        if is_active:
            self.accept_cut()
        elif path.suffix == ".seg":
            self.handle_sealed(path, original, heal)

    def accept_cut(self) -> None:
        """Some of the last batches may be gone, which no earlier view must miss."""
        left = self.log.next_batch - LogView(self.directory).first_batch()
        if left < len(self.expected):
            assert self.log.manifest.history == self.history + 1
        self.expected = self.expected[:left]
        self.history = self.log.manifest.history

    def handle_sealed(self, path: Path, original: bytes, heal: bool) -> None:
        """Damage that opening does not look for is found by reading, and by healing."""
        try:
            assert lsns(self.directory) == self.expected
            return  # a header's reserved bytes
        except CorruptionError:
            pass
        if heal:
            again_from = healed(self.log, ORIGIN, ORIGIN)
            assert again_from == self.log.end
            self.accept_cut()
        else:
            path.write_bytes(original)

    def end_writer(self, well: bool) -> None:
        if well:
            self.log.close()
        else:
            crash(self.log)

    @invariant()
    def holds_what_it_must(self) -> None:
        assert lsns(self.directory, self.history) == self.expected
        manifest = manifest_of(self.directory)
        assert manifest == self.log.manifest
        if self.expected:
            view = LogView(self.directory)
            middle = len(self.expected) // 2
            sought = view.seek(Cursor(self.expected[middle], 0))
            assert sought == view.first_batch() + middle


LogUnderDamage.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=25, deadline=None
)
TestLogUnderDamage = LogUnderDamage.TestCase


@settings(max_examples=examples(40), deadline=None)
@given(
    synced=st.integers(0, 3),
    more=st.integers(0, 3),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    zeros=st.booleans(),
    newer=st.booleans(),
)
def test_a_power_cut_takes_only_what_was_not_synced(
    synced: int, more: int, cuts: tuple[float, float], zeros: bool, newer: bool
) -> None:
    """Each file keeps what was synced, and of the rest any part; or zeros in its place."""
    directory = Path(tempfile.mkdtemp())
    try:
        log = LogWriter(directory, durability="memory")
        history = log.manifest.history
        for lsn in range(synced):
            append(log, lsn + 10)
        log._syncer.flush()
        files = (active_data(directory), active_index(directory))
        kept = [path.stat().st_size for path in files]
        for lsn in range(synced, synced + more):
            append(log, lsn + 10)
        assert log.durable_end == read_durable(directory)
        crash(log)
        for path, cut, least in zip(files, cuts, kept, strict=True):
            size = path.stat().st_size
            os.truncate(path, least + int(cut * (size - least)))
            if zeros:
                os.truncate(path, size)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recover, "_boot", lambda: "after the power came back")
            log = LogWriter(directory, term=int(newer))
        found = lsns(directory)
        assert found == list(range(10, 10 + len(found)))
        assert synced <= len(found) <= synced + more
        assert log.manifest.history == history + 1
        append(log, 90)
        log.close()
        assert lsns(directory, history + 1) == [*found, 90]
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def three_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("three")
    log = LogWriter(directory, durability="memory")
    for lsn in (10, 20, 30):
        append(log, lsn)
    crash(log)
    return directory


def reopened(three_batches: Path, data: bytes) -> list[int]:
    """What a writer, and then a reader, make of an active segment with these bytes."""
    directory = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(three_batches, directory, dirs_exist_ok=True)
        active_data(directory).write_bytes(data)
        log = LogWriter(directory)
        append(log, 40)
        log.close()
        return lsns(directory)
    finally:
        shutil.rmtree(directory)


@settings(max_examples=examples(40), deadline=None)
@given(cut=st.floats(0, 1))
def test_a_torn_tail_is_cut_at_the_last_whole_batch(three_batches: Path, cut: float) -> None:
    data = active_data(three_batches).read_bytes()
    kept = int(cut * len(data))
    whole = kept * 3 // len(data)
    assert reopened(three_batches, data[:kept]) == [*[10, 20, 30][:whole], 40]


@settings(max_examples=examples(40), deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_active_segment_cuts_from_the_damaged_batch_on(
    three_batches: Path, place: float, bit: int
) -> None:
    data = bytearray(active_data(three_batches).read_bytes())
    at = int(place * len(data))
    data[at] ^= 1 << bit
    damaged = at * 3 // len(data)
    found = reopened(three_batches, bytes(data))
    # The reserved bytes of a header are the only ones that may differ without harm.
    if found != [10, 20, 30, 40]:
        assert found == [*[10, 20, 30][:damaged], 40]
    else:
        assert 4 <= at % (len(data) // 3) < 8
