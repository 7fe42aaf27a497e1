"""Fixtures are plugins, one file a server."""

pytest_plugins = ["tests.fix_postgres", "tests.fix_redis", "tests.fix_http"]
