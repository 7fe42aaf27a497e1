"""Histories that no server at hand can be brought to show."""

from __future__ import annotations

import pickle

import pytest

from cdc.cursor import Cursor
from cdc.errors import GapError, SourceError, TransientError, WalbrookError
from cdc.replication.source.identity import (
    Identity,
    Recorded,
    Server,
    check_cluster,
    check_resume,
    parse_history,
)
from cdc.replication.source.slot_row import slot_row

SLOT = slot_row(
    "s",
    {
        "slot_type": "logical",
        "plugin": "pgoutput",
        "database": "shop",
        "temporary": False,
        "wal_status": "reserved",
        "confirmed_flush_lsn": "0/64",
    },
    -1,
)


def server(timeline: int = 1, *, end_lsn: int = 1000, in_recovery: bool = False) -> Server:
    return Server("7", timeline, "shop", 180000, in_recovery, end_lsn, "0")


def refusal(identity: Identity, resume: Cursor) -> WalbrookError:
    with pytest.raises(WalbrookError) as caught:
        check_resume(identity, resume)
    return caught.value


def test_the_history_of_a_timeline_says_where_each_ancestor_ended() -> None:
    text = (
        "1\t0/3000060\tno recovery target specified\n\n# a comment\n"
        "2\t1/A0\tbefore 2000-01-01 00:00:00+00\n"
    )
    assert parse_history(text) == {1: 0x3000060, 2: 0x1000000A0}
    assert parse_history("") == {}


def test_another_cluster_and_an_older_timeline_are_refused() -> None:
    check_cluster(server(3), Recorded("7", None))
    check_cluster(server(3), Recorded("7", 3))
    check_cluster(server(3), Recorded("7", 2))
    with pytest.raises(SourceError, match="another cluster answers") as other:
        check_cluster(server(3), Recorded("8", 3))
    assert other.value.kind == "other_cluster"
    with pytest.raises(GapError, match="from before a failover") as older:
        check_cluster(server(3), Recorded("7", 4))
    assert older.value.kind == "older_timeline"


def identity_of(
    found: Server, *, failed_over_from: int | None = None, fork_lsn: int | None = None
) -> Identity:
    return Identity(
        found,
        slot=SLOT,
        publication_oid=1,
        source="shop",
        failed_over_from=failed_over_from,
        fork_lsn=fork_lsn,
    )


@pytest.mark.parametrize("resume", [Cursor(500, 1), Cursor(501, 0)])
def test_a_position_beyond_the_fork_is_refused(resume: Cursor) -> None:
    identity = identity_of(server(2), failed_over_from=1, fork_lsn=500)
    check_resume(identity, Cursor(500, 0))
    check_resume(identity, Cursor(499, 9))
    error = refusal(identity, resume)
    assert (type(error), error.kind) == (GapError, "diverged")


def test_wal_that_ends_before_our_cursor_is_an_older_history_or_a_standby_behind() -> None:
    error = refusal(identity_of(server(end_lsn=200)), Cursor(201, 0))
    assert (type(error), error.kind) == (GapError, "older_history")
    standby = identity_of(server(end_lsn=200, in_recovery=True))
    error = refusal(standby, Cursor(201, 0))
    assert (type(error), error.kind) == (TransientError, "standby_behind")


def test_a_slot_beyond_our_cursor_is_a_gap() -> None:
    identity = identity_of(server())
    check_resume(identity, Cursor(100, 0))
    assert refusal(identity, Cursor(99, 5)).kind == "slot_ahead"


def test_an_error_keeps_its_kind_across_processes() -> None:
    error = GapError("what", fix="fix", kind="diverged")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.what, copy.fix, copy.kind) == (GapError, "what", "fix", "diverged")
