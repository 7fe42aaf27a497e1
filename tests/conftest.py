"""Fixtures are plugins, one file a server."""

import os

from hypothesis import settings

from cdc.log.flight_wire import TOKEN_VARIABLE

# Spark's JVM is started once a process, by whichever test comes first, and hands its environment on
# to the Python workers of all that follow.
os.environ.setdefault(TOKEN_VARIABLE, "a token of this test run")

# How long an example takes says more of the machine than of the code; pytest's own limit stands.
settings.register_profile("walbrook", deadline=None)
settings.load_profile("walbrook")

pytest_plugins = [
    "tests.fix_postgres", "tests.fix_redis", "tests.fix_http", "tests.fix_ledger",
    "tests.fix_event_lane",
]  # fmt: skip
