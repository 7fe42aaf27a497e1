"""A thread that keeps the shop busy until it is stopped.

Invariants: ``stop`` returns within its bound, whatever state the server is in. A server
that goes away is tried again; the shop's state is all in it.
"""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Final, Self

import psycopg

from cdc.errors import OperatorError
from demo.shop import Shop

_RECONNECT_S: Final = 1.0
_STOP_TIMEOUT_S: Final = 10.0
_IMPORT_AFTER: Final = 100  # transactions: small ones come before and after the large one
_READ_BY_SOMEBODY: Final = "SELECT FROM pg_replication_slots WHERE active"


class Writer:
    """Trades about ``pace_s`` apart, and once imports ``import_rows`` customers in one go."""

    def __init__(self, dsn: str, *, pace_s: float, seed: int, import_rows: int = 0) -> None:
        self._dsn = dsn
        self._pace_s = pace_s
        self._choose = random.Random(seed)
        self._import_rows = import_rows
        self._asked_to_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shop-writer", daemon=True)
        self.transactions = 0
        self._error: psycopg.Error | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the transaction at hand, and end."""
        self._asked_to_stop.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def require_well(self) -> None:
        """Raise if a statement of the shop was refused."""
        if self._error is not None:
            raise OperatorError(
                f"the shop had to close: {self._error}", fix="correct the shop's statements"
            ) from self._error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._asked_to_stop.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True, connect_timeout=5) as connection:
                    self._trade(connection)
            except psycopg.OperationalError:
                self._asked_to_stop.wait(_RECONNECT_S)
            except psycopg.Error as error:
                self._error = error
                return

    def _trade(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        # What is written before there is a slot would never be streamed.
        while connection.execute(_READ_BY_SOMEBODY).fetchone() is None:
            if self._asked_to_stop.wait(_RECONNECT_S / 10):
                return
        shop = Shop(connection, self._choose)
        shop.open()
        while not self._asked_to_stop.wait(self._pace_s):
            if self._import_rows and self.transactions >= _IMPORT_AFTER:
                shop.import_customers(self._import_rows)
                self._import_rows = 0
            shop.trade()
            self.transactions += 1
