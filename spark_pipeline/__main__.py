"""The Spark driver as a process: ``python -m spark_pipeline CONFIG --term SOURCE=N …``.

Started by the supervisor, which holds the other end of our standard input: when it dies, so do we.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cdc.replication.stop import StopSignal


def main() -> int:
    # Importing Spark takes seconds; a stop that comes in the meantime must be heard.
    stop = StopSignal()
    stop.on_signals()
    stop.on_parent_death()
    return run(stop)


def run(stop: StopSignal) -> int:
    """Serve every source of the configuration until ``stop``."""
    import structlog

    from cdc.config import load
    from cdc.errors import ConfigError, exit_status
    from cdc.service.logs import configure_logs
    from spark_pipeline.expressions.tables import check_config, has_expressions
    from spark_pipeline.lanes import SourceLanes, run_lanes
    from spark_pipeline.session import open_session
    from spark_pipeline.settings import LaneSettings

    parser = argparse.ArgumentParser(prog="spark_pipeline")
    parser.add_argument("config", type=Path)
    parser.add_argument("--term", action="append", default=[], metavar="SOURCE=N")
    arguments = parser.parse_args()
    config = load(arguments.config)
    configure_logs(config.service)
    logger = structlog.get_logger("walbrook.lane")
    terms = dict(pair.rsplit("=", 1) for pair in arguments.term)

    session = open_session(config.spark)
    if has_expressions(config):
        try:
            found = check_config(session, config)
            found.raise_problems()
        except ConfigError as error:
            session.stop()
            print(f"walbrook: {error}", file=sys.stderr)
            return exit_status(error)
        for unchecked in found.unchecked:
            logger.warning("expressions.unchecked", what=unchecked)
    lanes = [
        SourceLanes(session, LaneSettings.of(config, database, int(terms[database.name])), stop)
        for database in config.databases
    ]
    logger.info("lanes.started", sources=list(terms))
    failures = run_lanes(lanes, config.service.drain_timeout_s, stop)
    session.stop()
    for failure in failures:
        print(f"walbrook: {failure}", file=sys.stderr)
    return max((exit_status(failure) for failure in failures), default=0)


if __name__ == "__main__":
    sys.exit(main())
