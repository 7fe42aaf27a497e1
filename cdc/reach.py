"""Connections for commands and checks: a database that does not answer is an error with its fix."""

from __future__ import annotations

import psycopg

from cdc.connection import Connection, connect
from cdc.errors import OperatorError


class UnreachableError(OperatorError):
    """A database cannot be connected to: it is down, or its address or password is wrong."""


def reach(dsn: str, what: str) -> Connection:
    """An ordinary autocommit connection; a server that does not answer is named by ``what``."""
    try:
        return connect(dsn, name="service", statement_s=120)
    except psycopg.OperationalError as error:
        raise UnreachableError(
            f"{what} cannot be reached: {str(error).strip()}",
            fix="check that it runs, and its address, user and password in the configuration",
        ) from error
