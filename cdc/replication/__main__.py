"""The reader as a process: ``python -m cdc.replication CONFIG SOURCE``.

Started by the supervisor, which holds the other end of our standard input: when it dies, so do we.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cdc.config import load
from cdc.errors import WalbrookError, exit_status
from cdc.replication.reader import ReaderSettings, SlotReader
from cdc.replication.stop import StopSignal
from cdc.service.logs import configure_logs


def main() -> int:
    parser = argparse.ArgumentParser(prog="cdc.replication")
    parser.add_argument("config", type=Path)
    parser.add_argument("source")
    arguments = parser.parse_args()
    config = load(arguments.config)
    configure_logs(config.service)
    database, log = config.database(arguments.source), config.log

    stop = StopSignal()
    stop.on_signals()
    stop.on_parent_death()
    settings = ReaderSettings(
        source=database.name,
        dsn=database.dsn(),
        slot=database.slot.name,
        publication=database.publication.name,
        state_dsn=config.state_dsn(),
        log_directory=log.directory / database.name,
        durability=log.durability,
        batch_rows=log.batch_rows,
        batch_bytes=log.batch_bytes,
        linger_ms=log.linger_ms,
        segment_bytes=log.segment_bytes,
        log_bytes_max=log.max_bytes,
    )
    try:
        SlotReader(settings, stop).run()
    except WalbrookError as error:
        print(f"walbrook: {error}", file=sys.stderr)
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
