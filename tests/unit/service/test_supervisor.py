"""The supervisor over small processes that stand for the readers and the driver."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cdc.config import Config, loads
from cdc.errors import NEEDS_OPERATOR
from cdc.service.process import supervisor
from cdc.service.process.supervisor import Child, ServiceChange, Supervisor
from cdc.stop import StopSignal
from tests.waiting import until

CONFIG = """
databases:
  - {name: fine, url: "postgres://u:p@h/d", slot: {name: s}, publication: {name: p}}
  - {name: lost, url: "postgres://u:p@h/e", slot: {name: t}, publication: {name: p}}
"""
BEATS = """
import sys, time
from cdc.pulse import Pulse
pulse = Pulse(int(sys.argv[1].removeprefix("--pulse=")))
while True:
    pulse.beat(1)
    time.sleep(0.05)
"""
WAITS = "import sys; sys.stdin.read()"
STOPS = f"import sys; sys.exit({NEEDS_OPERATOR})"
# A driver that keeps what it is started with and what it is told.
LISTENS = """
import sys, pathlib
said = pathlib.Path(sys.argv[1], "said").open("a", buffering=1)
print(*(each for each in sys.argv[2:] if not each.startswith("--pulse=")), file=said)
for line in sys.stdin:
    said.write(line)
"""


@dataclass
class Source:
    term: int | None = None


def test_a_process_that_hangs_is_ended_and_started_again() -> None:
    child = Child("reader", [sys.executable, "-c", BEATS], has_pulse=True)
    try:
        child.start()
        pulse, process = child.pulse, child.process
        assert pulse is not None
        assert process is not None

        def beats() -> bool:
            child.mind()
            # The bound of a process that has not said anything yet is far away.
            return pulse._due - child.started_at < 60

        until("the first sign of life", beats)
        os.kill(process.pid, signal.SIGSTOP)

        def again() -> bool:
            child.mind()
            return child.starts == 2 and child.alive

        until("a second start", again)
        assert process.returncode == -signal.SIGKILL
    finally:
        child.stop(5)


def test_a_process_is_starting_until_its_first_sign_of_life() -> None:
    waits = Child("driver", [sys.executable, "-c", WAITS], has_pulse=True, first_pulse_s=math.inf)
    beats = Child("driver", [sys.executable, "-c", BEATS], has_pulse=True, first_pulse_s=math.inf)
    assert not waits.is_starting
    try:
        waits.start()
        beats.start()
        until("the sign of life", lambda: not beats.is_starting)
        assert beats.alive
        waits.mind()
        assert waits.is_starting
    finally:
        waits.stop(30)
        beats.stop(30)
    assert not waits.is_starting


def test_a_process_that_cannot_be_ended_yet_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PULSE_S", 0.0)
    child = Child("reader", [sys.executable, "-c", WAITS], has_pulse=True)
    child.start()
    process = child.process
    assert process is not None
    kill = process.kill
    # As with a process that waits for a disk: the signal is there, and nothing happens.
    monkeypatch.setattr(process, "kill", lambda: None)
    for _ in range(3):
        child.mind()
    assert (child.alive, child.starts) == (True, 1)
    kill()
    process.wait(30)
    child.mind()
    assert child.process is None


def test_a_line_for_a_process_that_has_ended_is_lost_and_the_process_starts_again() -> None:
    child = Child("driver", [sys.executable, "-c", "pass"])
    child.start()
    assert child.process is not None
    child.process.wait(30)
    child.tell("source=1")
    child.mind()
    assert child.process is None
    child.start_after = 0.0
    child.mind()
    assert child.starts == 2
    child.stop(30)


def test_a_source_that_needs_an_operator_is_tried_again_while_the_others_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {"reader fine": WAITS, "reader lost": STOPS, "driver": WAITS}
    with supervised(monkeypatch, tmp_path, programs) as running:
        fine, lost = running.child("reader fine"), running.child("reader lost")
        pid = fine.process and fine.process.pid
        until("three starts", lambda: lost.starts >= 3)
        assert fine.process is not None
        assert (fine.process.pid, fine.starts) == (pid, 1)
        assert running.supervisor.processes()["reader fine"]
        assert running.status is None
    assert running.status == 0


def test_a_service_of_which_no_source_can_be_read_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {"reader fine": STOPS, "reader lost": STOPS, "driver": WAITS}
    with supervised(monkeypatch, tmp_path, programs) as running:
        until("the end", lambda: running.status == 1)


def test_a_driver_that_cannot_start_at_all_ends_the_service_and_a_later_one_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {"reader fine": WAITS, "reader lost": WAITS, "driver": STOPS}
    with supervised(monkeypatch, tmp_path, programs) as running:
        until("the end", lambda: running.status == 1)
    killed = {**programs, "driver": "import os; os.kill(os.getpid(), 9)"}
    with supervised(monkeypatch, tmp_path, killed) as running:
        until("a second start", lambda: running.child("driver").starts == 2)
        programs_now = running.programs
        programs_now["driver"] = STOPS
        until("a fourth start", lambda: running.child("driver").starts == 4)
        assert running.status is None


def test_a_source_that_becomes_ready_later_reaches_a_driver_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {"reader fine": WAITS, "reader lost": WAITS, "driver": LISTENS}
    late = Source()
    with supervised(monkeypatch, tmp_path, programs, late) as running:
        said = tmp_path / "said"
        until("the driver", said.exists)
        assert running.supervisor.processes() == {
            "reader fine": True,
            "reader lost": False,
            "driver": True,
        }
        late.term = 7
        until("its term", lambda: said.read_text() == "--term=fine=3\nlost=7\n")
        driver = running.child("driver").process
        assert driver is not None
        driver.kill()
        until("the next driver", lambda: "--term=fine=3 --term=lost=7" in said.read_text())


def test_a_change_ends_the_reader_of_a_source_and_the_driver_hears_of_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {"reader fine": WAITS, "reader lost": WAITS, "driver": LISTENS}
    with supervised(monkeypatch, tmp_path, programs) as running:
        said, supervisor = tmp_path / "said", running.supervisor
        fine, lost = running.child("reader fine"), running.child("reader lost")
        process = fine.process
        assert process is not None
        until("the driver", said.exists)
        supervisor.change(ServiceChange({"fine": Source(3)}, frozenset({"lost"}), 7))
        until("the revision", lambda: said.read_text().endswith("revision 7\n"))
        until("the end of the reader", lambda: not supervisor.is_changing)
        assert lost.process is None
        assert fine.process is process
        assert supervisor.processes() == {"reader fine": True, "driver": True}
        assert supervisor.source_names == ["fine"]
        supervisor.change(ServiceChange({"fine": Source(3), "lost": Source(9)}, frozenset(), 7))
        until("its term", lambda: said.read_text().endswith("lost=9\n"))
        driver = running.child("driver").process
        assert driver is not None
        driver.kill()
        started = "--term=fine=3 --term=lost=9 --revision=7"
        until("the next driver", lambda: started in said.read_text())


@dataclass
class Running:
    supervisor: Supervisor
    programs: dict[str, str]
    status: int | None = None

    def child(self, name: str) -> Child:
        def found() -> list[Child]:
            return [c for c in self.supervisor._children if c.name == name and c.starts]

        return until(name, found)[0]


@contextmanager
def supervised(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    programs: dict[str, str],
    lost: Source | None = None,
) -> Iterator[Running]:
    """A supervisor in a thread; ``programs`` by the name of the process, changed at will."""

    def command(module: str, path: Path, *arguments: object) -> list[str]:
        name = f"reader {arguments[0]}" if module == "cdc.replication" else "driver"
        pick = f"import sys; exec(open({str(directory / name)!r}).read())"
        return [sys.executable, "-c", pick, str(directory), *map(str, arguments)]

    class Files(dict[str, str]):
        def __setitem__(self, name: str, program: str) -> None:
            (directory / name).write_text(program)

    files = Files()
    for name, program in programs.items():
        files[name] = program
    monkeypatch.setattr(supervisor, "_module", command)
    sources = {"fine": Source(3), "lost": lost or Source(4)}
    stop = StopSignal()
    running = Running(Supervisor(config(directory), directory, sources), files)

    def run() -> None:
        running.status = running.supervisor.run(stop, lambda: None)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield running
    finally:
        stop.request()
        thread.join(30)
    assert not thread.is_alive()


def config(directory: Path) -> Config:
    return loads(CONFIG, directory, {})
