"""What all destinations have in common, and what the pipeline asks of their classes."""

from __future__ import annotations

from typing import ClassVar

from cdc.config.scalars import Section


class DestinationSection(Section):
    """What all of them say of themselves."""

    defers: ClassVar[bool] = False
    """Whether a message may be delivered later than those that follow it."""

    message_bytes_max: ClassVar[int | None] = None
    """The largest message that it can take; None without a bound that we know."""

    rewind_ways: ClassVar[tuple[str, ...]] = ()
    """What a rewind can do with what it holds: new_generation, truncate (cdc.generation).

    None where it keeps no position of its own: it gets everything again without more ado.
    """

    takes_references: ClassVar[bool] = False
    """Whether a message may carry a reference to its content, which is stored elsewhere."""

    default_partition_count: ClassVar[int] = 1
    """Over how many deliveries at once groups are spread where the sink does not say."""

    writes_columns: ClassVar[bool] = False
    """Whether it writes columns, not messages, so that there is nothing to shape or transform."""

    @property
    def delivery_rows(self) -> int:
        """Most messages at once; to one that holds tables each delivery is a commit."""
        return 10_000

    @property
    def delivery_bytes(self) -> int:
        """About how many bytes they have at most."""
        return 32 * 2**20

    @property
    def takes_texts(self) -> bool:
        """Whether it has typed columns, which are written from the texts that the source wrote."""
        return False

    @property
    def reload_refusal(self) -> str | None:
        """Why no table of it can be reloaded; None if they can."""
        return "its destination has no tables that could be swapped"

    @property
    def holds_tables(self) -> bool:
        """Whether its sink writes columns of rows as they are, and never the text of a message."""
        return False
