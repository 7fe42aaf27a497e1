"""Opening the configured ledger, in whichever process delivers.

An address is handed to Spark's workers with their work, so it is small, and prints no secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cdc.config import Config
from cdc.config.secrets import SecretText
from cdc.queue.ledger.base import Ledger
from cdc.queue.ledger.postgres import PostgresLedger
from cdc.queue.ledger.redis import RedisLedger


@dataclass(frozen=True)
class LedgerAddress:
    """Where the ledger is."""

    type: Literal["postgres", "redis"]
    url: SecretText  # or a libpq connection string
    timeout_s: float = 0.5  # of Redis

    @classmethod
    def of(cls, config: Config) -> LedgerAddress:
        ledger = config.ledger
        url = SecretText(config.state_dsn()) if ledger.url is None else ledger.url
        return cls(ledger.type, url, ledger.timeout_ms / 1000)


def open_ledger(address: LedgerAddress) -> Ledger:
    """It connects when it is first asked."""
    url = address.url.get_secret_value()
    if address.type == "redis":
        return RedisLedger(url, timeout_s=address.timeout_s)
    return PostgresLedger(url)
