"""Signs of life between a process and its supervisor."""

from __future__ import annotations

from cdc.pulse import Pulse, PulseMonitor


def test_beats_that_were_not_read_for_long_still_count_as_beats() -> None:
    monitor = PulseMonitor(0.0)
    pulse = Pulse(monitor.write_end)
    for _ in range(1366):  # one byte and a line end more than a page
        pulse.beat(60)
    assert not monitor.is_overdue
    assert not monitor.is_overdue
    monitor.started()
    monitor.close()
