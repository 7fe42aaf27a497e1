"""The whole pipeline on this machine, nothing else needed: ``python -m demo``.

An embedded Postgres holds a small shop; the service streams it to files, to Parquet and, where a
Redis server is found, to a Redis stream. For some seconds customers come and go; then everything
that was written is compared with everything that arrived. Exit status 0 means that all agree.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from cdc.errors import OperatorError, WalbrookError
from demo.demo import Demo


def main() -> int:
    """Run the demo; 0 if all agree, 1 if something differs or fails, 130 after Ctrl-C."""
    options = _options()
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped as by Ctrl-C: tidily
    try:
        directory = _new_directory(options.directory)
        demo = Demo(directory, seconds=options.seconds, seed=options.seed, console=console)
        agrees = demo.run()
    except WalbrookError as error:
        console.print(f"demo: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped before the end; nothing was compared.")
        return 130
    if agrees and options.directory is None:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        console.print(f"Everything is kept in {directory}.", highlight=False, soft_wrap=True)
    return 0 if agrees else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Stream a busy shop for some seconds and prove that everything arrived.",
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="how long the shop is open (default 8)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="a new or empty directory to work in, kept; if not given, a temporary one",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().getrandbits(31),
        help="of the customers' choices; if not given, a new one",
    )
    return parser.parse_args()


def _new_directory(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="walbrook-demo-"))
    if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
        raise OperatorError(f"{wanted} is not empty", fix="name a new directory")
    wanted.mkdir(parents=True, exist_ok=True)
    return wanted.resolve()


if __name__ == "__main__":
    sys.exit(main())
