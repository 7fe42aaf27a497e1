"""One change to the shop, as the ledger notes it and as a sink hands it back."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str | None, ...]
"""The text of each key column; None where a record lacks it."""


@dataclass(frozen=True)
class Change:
    """Which change (``xid`` and its place there), to which row, and digests of what it says."""

    xid: int
    idx: int
    table: str
    action: str
    key: Key  # as the row says it
    old_key: Key
    record_pks: Key  # as the metadata says it
    digest: str | None  # of the row; None where the ledger has nothing to compare with
    before: str | None  # of the row before an update; likewise

    def __str__(self) -> str:
        return f"{self.action} of {self.table} {key_text(self.key)} ({self.xid}:{self.idx})"


def key_text(key: Key) -> str:
    """A key for people."""
    return "/".join(part or "?" for part in key)


State = dict[tuple[str, Key], str]
"""The digest of every row there is, by table and key."""
