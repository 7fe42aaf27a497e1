"""The reader as a process: ``python -m cdc.replication CONFIG SOURCE --term N``.

Started by the supervisor, which holds the other end of our standard input: when it dies, so do we.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cdc.config import load
from cdc.errors import WalbrookError, exit_status
from cdc.logs import configure_logs, log_end
from cdc.metrics.snapshot import begin_snapshots
from cdc.pulse import Pulse
from cdc.replication.reader import SlotReader
from cdc.replication.settings import settings_of
from cdc.replication.state_link import tell_failed_start
from cdc.stop import StopSignal


def main() -> int:
    parser = argparse.ArgumentParser(prog="cdc.replication")
    parser.add_argument("config", type=Path)
    parser.add_argument("source")
    parser.add_argument("--term", type=int, required=True)
    parser.add_argument("--base", type=Path, help="where relative paths in CONFIG begin")
    parser.add_argument("--pulse", type=int, help="the descriptor for signs of life")
    arguments = parser.parse_args()
    config = load(arguments.config, base=arguments.base)
    configure_logs(config.service)
    begin_snapshots()

    stop = StopSignal()
    stop.on_signals()
    stop.on_parent_death()
    settings = settings_of(config, arguments.source, arguments.term)
    try:
        reader = SlotReader(settings, stop, Pulse(arguments.pulse))
    except WalbrookError as error:
        tell_failed_start(settings.state_dsn, settings.source, settings.term, error)
        return _ended(settings.source, error)
    try:
        reader.run()
    except WalbrookError as error:
        return _ended(settings.source, error)
    return 0


def _ended(source: str, error: WalbrookError) -> int:
    log_end(f"reader {source}", error)
    return exit_status(error)


if __name__ == "__main__":
    sys.exit(main())
