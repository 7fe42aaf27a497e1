"""``python -m benchmarks [NAME]``: run one benchmark, or all of them.

Each one's result is a line of JSON on standard output, the last that it writes, and a file in
``benchmarks/results``. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import orjson

from benchmarks import (
    backfill,
    consumers,
    decode,
    eventtime,
    idle,
    lakehouse,
    large,
    latency,
    live_config,
    outage,
    pipeline,
    queue,
    read,
    sinks,
    start,
    webhook,
)
from benchmarks.sizes import Sizes, progress
from cdc.config import Service
from cdc.errors import WalbrookError
from cdc.logs import configure_logs
from cdc.version import VERSION

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Benchmark:
    """What it runs, and how much of it where nothing is said."""

    run: Callable[[Sizes], dict[str, object]]
    sizes: Sizes = Sizes()  # noqa: RUF009


BENCHMARKS = {
    "backfill": Benchmark(backfill.run),
    "decode": Benchmark(lambda _sizes: decode.run()),
    "eventtime": Benchmark(eventtime.run),
    "read": Benchmark(read.run),
    "large": Benchmark(large.run),
    "pipeline": Benchmark(pipeline.run),
    "consumers": Benchmark(consumers.run, Sizes(rows=200_000)),
    "latency": Benchmark(latency.run),
    "live_config": Benchmark(live_config.run, Sizes(seconds=80)),
    "outage": Benchmark(outage.run, Sizes(rate=5_000, seconds=60)),
    "idle": Benchmark(idle.run, Sizes(seconds=30)),
    "start": Benchmark(start.run),
    "webhook": Benchmark(webhook.run, Sizes(seconds=5)),
    "queue": Benchmark(queue.run),
    "lakehouse": Benchmark(lakehouse.run, Sizes(seconds=60)),
    "sinks": Benchmark(sinks.run, Sizes(rows=200_000)),
}


def main() -> int:
    name, given = _arguments()
    # A stop from outside unwinds like any other, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    configure_logs(Service(log_level="warning"))
    failed = False
    for each in [name] if name else BENCHMARKS:
        try:
            print(_result(each, given), flush=True)
        except WalbrookError as error:
            progress(f"benchmark {each}: {error}")
            failed = True
    return 1 if failed else 0


def _result(name: str, given: dict[str, int]) -> str:
    """Run a benchmark; its figures with where and when they were taken, stored and returned."""
    context = {
        "benchmark": name,
        "walbrook": VERSION,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    benchmark = BENCHMARKS[name]
    result = orjson.dumps(context | benchmark.run(replace(benchmark.sizes, **given)))
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"{name}.json").write_bytes(result + b"\n")
    return result.decode()


def _arguments() -> tuple[str | None, dict[str, int]]:
    names = ", ".join(BENCHMARKS)
    parser = argparse.ArgumentParser(prog="benchmarks", description=f"Benchmarks: {names}.")
    parser.add_argument("name", nargs="?", help="which one; all of them if not given")
    used_by = {
        "rows": "backfill, read, large, pipeline, consumers, eventtime, lakehouse: rows to read; "
        "queue: messages to fetch; sinks: messages to send",
        "transaction_rows": "read, pipeline, consumers, eventtime, lakehouse: rows per transaction",
        "rounds": "read, large, queue, sinks, start: how often each way is measured",
        "rate": "latency, live_config, outage, sinks, lakehouse: changes per second",
        "seconds": "latency, live_config, outage, idle, sinks, lakehouse: how long is measured; "
        "webhook: for how long each sink has messages",
        "outage": "outage: for how many seconds a sink is down",
    }
    for field in fields(Sizes):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_positive,
            metavar="N",
            help=f"{used_by[field.name]} ({_defaults(field.name)})",
        )
    given = vars(parser.parse_args())
    name: str | None = given.pop("name")
    if name is not None and name not in BENCHMARKS:
        parser.error(f"there is no benchmark '{name}'; name one of {names}")
    return name, {size: number for size, number in given.items() if number is not None}


def _defaults(size: str) -> str:
    """What holds for most, and for whom not."""
    most = getattr(Sizes(), size)
    others = [
        f"{name} {number}"
        for name, benchmark in BENCHMARKS.items()
        if (number := getattr(benchmark.sizes, size)) != most
    ]
    return ", ".join([str(most), *others])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
