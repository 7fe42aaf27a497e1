"""The reader's way to the recorded table versions, in the state database.

Reading goes on without the database until a version is met that is not recorded, and a connection
to the source does not need it either, once the versions were read.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from cdc.connection import connect
from cdc.cursor import Cursor
from cdc.decoding.table_version import TableVersion
from cdc.error_text import public_text
from cdc.errors import TransientError
from cdc.failpoints import reached
from cdc.replication.wire.table_versions import TableVersions
from cdc.state.schema_versions import known_versions, record_versions


class VersionStore:
    """The versions of one source, under one term of the service."""

    def __init__(self, dsn: str, source: str, term: int) -> None:
        self._dsn = dsn
        self._source = source
        self._term = term
        # As recorded, complete from a cursor on; None before they were read.
        self._recorded: tuple[Cursor, list[TableVersion]] | None = None

    def versions(self, resume: Cursor) -> TableVersions:
        """For a connection to the source that goes on at ``resume``."""
        if self._recorded is None or resume < self._recorded[0]:
            try:
                with connect(self._dsn, name=f"{self._source}:state", statement_s=5) as state:
                    found = known_versions(state, self._source, resume)
            except psycopg.Error as error:
                raise _unreachable(error) from error
            self._recorded = (resume, found)
        return TableVersions(self._recorded[1])

    def record(self, versions: Sequence[TableVersion]) -> None:
        """Record what a batch is the first to show, before it goes into the log.

        After an error it is not known what was recorded: it is read again with the next connection.
        """
        if not versions:
            return
        assert self._recorded is not None
        since, known = self._recorded
        self._recorded = None
        try:
            with connect(self._dsn, name=f"{self._source}:state", statement_s=5) as state:
                record_versions(state, self._source, self._term, versions)
        except psycopg.Error as error:
            raise _unreachable(error) from error
        self._recorded = (since, [*known, *versions])
        reached("recorded")


def _unreachable(error: psycopg.Error) -> TransientError:
    return TransientError(
        f"the state database does not answer, and a table has a version that is not recorded "
        f"there: {public_text(error)}",
        fix="reading goes on once it answers",
    )
