"""The one seam between the pipeline and a destination.

A sink is opened in the process that delivers, kept open, and handed the messages of one consumer
in cursor order, one batch after another. Invariant:

- ``deliver`` returns once the messages it counts are safe at the destination, and not before.
- It settles a prefix: of the batch's messages the first ``settled`` are safe, the rest are not.
- A batch may come again after a crash, cut differently. A sink that can hold a cursor or an id
  absorbs what it already has; one that cannot sends the same idempotency keys again.
- Two processes may hold the same sink for a moment after a crash. That must neither lose nor
  reorder anything.

A sink whose destination class says ``holds_tables`` is given the columns of MESSAGE_SCHEMA alone,
with ``TEXTS`` if it writes them: it asks the shape for nothing, and its batches are larger. Rows
that a backfill read come to it as they were read, without JSON if it has no use for it.

A sink that keeps a position at its destination is opened for a ``Generation`` (``cdc.generation``),
so that its consumer can be rewound. It does three things with it. Its place is
``generation.named(place)``. Beside its position it records ``generation.truncation``. Before it
delivers it asks ``generation.must_empty(recorded)``: if so, it empties the place in an order that a
crash does not break, and a sink that is out of date is refused there. Its destination class says in
``rewind_ways`` which of the two ways it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import pyarrow as pa

from cdc.backfill.table import PublishedTable
from cdc.change import MessageBatch
from cdc.cursor import Cursor
from cdc.errors import WalbrookError
from cdc.queue.ledger.base import Integers, LedgerUse
from cdc.verify.held import Form, Key

UNFIT_TABLE = "unfit_table"
"""The kind of an error of a sink that cannot have a table as it was when its rows were read."""


@dataclass(frozen=True)
class StoppedTable:
    """A table whose changes wait at the destination, so that those of others go on; and why."""

    table: str
    kind: str
    what: str
    fix: str


@dataclass(frozen=True)
class Delivery:
    """What became of a batch: its first ``settled`` messages are safe at the destination."""

    settled: int
    absorbed: int = 0  # of the settled ones, how many the destination already had
    error: WalbrookError | None = None  # why the rest is not settled; its type says what to do
    ledger: LedgerUse | None = None  # how its ledger did, if it has one and it was asked
    # The last message that the destination had before this delivery, ORIGIN for none; None where
    # it keeps no position. Below what was delivered earlier, it says that the destination lost it.
    top: Cursor | None = None
    stopped: tuple[StoppedTable, ...] | None = None  # after it; None if it is not known


class Sink(Protocol):
    """A destination for the messages of one consumer."""

    def deliver(self, batch: MessageBatch) -> Delivery:
        """Send the batch in order; never raises for what the destination does."""
        ...

    def close(self) -> None:
        """Let go of connections and files; what was delivered stays safe."""
        ...


@runtime_checkable
class FollowsRewinds(Protocol):
    """A sink that keeps a position and can take messages from below it again."""

    def follow(self, epoch: str) -> None:
        """Deliver in this epoch of the consumer; a new one begins whenever its cursor goes back."""
        ...


@runtime_checkable
class Reloads(Sink, Protocol):
    """A sink whose tables can be loaded afresh while readers have the old ones.

    It is sent marks (``cdc.backfill.reload``), each a batch of its own, which a position absorbs
    like any message. Which shadows there are is recorded at the destination, in what is committed
    with the position, because any process may deliver next.

    - ``begin``: make an empty shadow of the table in place of any that was left over. From then on
      every change of the table goes into both, and so do rows that were not read for this reload.
      What stands below the mark never goes into the shadow, also where it comes again.
    - ``swap``: in one commit at the destination the table becomes what its shadow is, with the
      shadow's columns, and the position moves behind the mark. A repeat of it changes nothing.
      OperatorError if there is no shadow of this reload.
    - ``drop``: remove the shadow of this reload; there may be none.

    A mark that is not done has changed nothing that readers see. Its error decides if it is worth
    another try (TransientError) or fails the reload. The class of its destination says in
    ``reload_refusal`` which settings rule reloads out.
    """

    def loading(self, reload: int | None) -> None:
        """From now on rows of the action ``read`` are those of this reload; None: of none."""
        ...


@runtime_checkable
class Probing(Protocol):
    """A sink that ``walbrook config check --connect`` can try."""

    def probe(self) -> str:
        """Try the destination: connect, authenticate, look.

        Nothing changes there, and it takes no longer than the sink's own timeouts. Returns what was
        checked and what was not, in one line without secrets. Raises WalbrookError for what is
        wrong, with the fix.
        """
        ...


def probe(sink: Sink) -> str:
    """What a look at the destination found, for sinks that can look."""
    return sink.probe() if isinstance(sink, Probing) else "nothing of it can be checked"


@runtime_checkable
class ReadsBack(Sink, Protocol):
    """A sink whose destination can say which rows of a table it holds."""

    @property
    def held_form(self) -> Form:
        """What the content of a row is there."""
        ...

    def read_back(
        self, table: PublishedTable, keys: Collection[Key] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """What the destination holds of a source's table, as ``HELD_SCHEMA``; nothing changes.

        With ``keys`` only rows that have one of them. Memory is bounded, and no transaction is held
        longer than one batch of rows takes. Raises WalbrookError for what cannot be read, with the
        fix.
        """
        ...


@runtime_checkable
class SideBySideSink(Sink, Protocol):
    """A sink that can send several batches at once."""

    def deliver_parts(self, parts: Sequence[MessageBatch]) -> list[Delivery]:
        """Send each part in order, all of them side by side; returns what became of each.

        An error that speaks of the destination as a whole ends every part.
        """
        ...


class Follower(Protocol):
    """Receives the results of the requests of a delivery."""

    @property
    def error(self) -> WalbrookError | None:
        """Why no other request may be sent."""
        ...

    def accepted(self, lsn: Integers, idx: Integers) -> None:
        """A request with these messages was accepted."""
        ...

    def finish(self) -> None:
        """No request is under way any more; the delivery ends when this returns."""
        ...


class Unfollowed:
    """For a delivery that is not followed."""

    error = None

    def accepted(self, lsn: Integers, idx: Integers) -> None:
        """Nothing is asked for."""

    def finish(self) -> None:
        """Nothing waits."""


class RequestSink(Sink, Protocol):
    """A sink that sends requests, several at once, and tells of each that was accepted."""

    messages_per_request: int
    """At most."""

    def deliver_parts(
        self, parts: Sequence[MessageBatch], follower: Follower | None = None
    ) -> list[Delivery]: ...
