"""The check of expressions as a process: ``python -m spark_pipeline.session.config_check CONFIG``.

``walbrook config check`` starts it. It prints what could not be checked, and ends with the status
of an operator's error if something is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from cdc.config import Spark, load
from cdc.errors import WalbrookError, exit_status


def main() -> int:
    from spark_pipeline.session.expressions_check import check_config, has_expressions
    from spark_pipeline.session.session import open_session

    parser = argparse.ArgumentParser(prog="spark_pipeline.session.config_check")
    parser.add_argument("config", type=Path)
    config = load(parser.parse_args().config)
    with tempfile.TemporaryDirectory() as scratch:
        session = None
        if has_expressions(config, sql=True):
            # A session of its own: nothing of a service that runs from the same file is touched.
            session = open_session(
                Spark(master="local[1]", checkpoint_directory=Path(scratch), log_level="OFF")
            )
        try:
            found = check_config(session, config)
        finally:
            if session is not None:
                session.stop()
    for unchecked in found.unchecked:
        print(f"not checked: {unchecked}")
    try:
        found.raise_problems()
    except WalbrookError as error:
        print(f"walbrook: {error}", file=sys.stderr)
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
