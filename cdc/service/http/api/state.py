"""A few connections to the state database, shared by the requests of the API.

Invariant: no more than ``_MOST`` are open, one that was left in the middle of something
is not used again, and a
request waits for one no longer than it would for its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from psycopg.pq import TransactionStatus

from cdc.connection import AsyncConnection, connect_async
from cdc.service.http.api.refusals import RefusedError

_MOST = 4
_STATEMENT_S = 30
_WAIT_S = 30.0
# A transaction that a client leaves open over SQL must not keep all of them for long.
_LOCKS = "SET lock_timeout = '10s'"

Rows = list[tuple[object, ...]]


class StateConnections:
    """Opened when they are needed, kept open for the next request."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._idle: list[AsyncConnection] = []
        self._free = asyncio.Semaphore(_MOST)

    async def fetch(self, query: str, values: Sequence[object] = ()) -> Rows:
        """All rows that a statement gives, in a transaction of its own."""
        async with self._connection() as connection:
            cursor = await connection.execute(query.encode(), values)
            return await cursor.fetchall()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        try:
            await asyncio.wait_for(self._free.acquire(), _WAIT_S)
        except TimeoutError:
            raise RefusedError(503, "too many requests are being served", fix="try again") from None
        try:
            while self._idle and self._idle[-1].closed:
                self._idle.pop()
            kept = self._idle.pop() if self._idle else None
            connection = kept or await self._open()
            try:
                yield connection
            finally:
                # Whatever it was in the middle of, the next request shall not meet it. A refusal
                # is no such thing.
                if connection.info.transaction_status == TransactionStatus.IDLE:
                    self._idle.append(connection)
                else:
                    await connection.close()
        finally:
            self._free.release()

    async def _open(self) -> AsyncConnection:
        connection = await connect_async(self._dsn, name="api", statement_s=_STATEMENT_S)
        try:
            await connection.execute(_LOCKS)
        except BaseException:
            await connection.close()
            raise
        return connection
