"""Fixtures are plugins, one file a server."""

import os
import signal

import pytest
from hypothesis import settings

from cdc.log.flight.wire import TOKEN_VARIABLE
from tests import durations

# Spark's JVM is started once a process, by whichever test comes first, and hands its environment on
# to the Python workers of all that follow.
os.environ.setdefault(TOKEN_VARIABLE, "a token of this test run")

# A shell that starts the tests in the background has its children ignore Ctrl-C. What the tests
# start must not inherit that, because some of it is stopped so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more of the machine than of the code; pytest's own limit stands.
settings.register_profile("walbrook", deadline=None)
settings.load_profile("walbrook")

pytest_plugins = [
    "tests.fix_postgres", "tests.fix_sinks", "tests.fix_redis", "tests.fix_http",
    "tests.fix_ledger", "tests.fix_event_pipeline", "tests.fix_spark", "tests.fix_tls",
    "tests.fix_kafka", "tests.fix_s3", "tests.fix_stores", "tests.fix_slot_batches",
    "tests.fix_sink_pipeline",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first; the tests of a file keep their order."""
    seconds = durations.known()

    def taken(item: pytest.Item) -> float:
        return seconds.get(item.location[0], durations.UNKNOWN_S)

    items.sort(key=taken, reverse=True)
