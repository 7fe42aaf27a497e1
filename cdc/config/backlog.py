"""A bound on what the change log keeps for one sink."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cdc.config.scalars import Section, Size


class MaxBacklog(Section):
    """How much of the change log one sink may hold, and what happens to it beyond that."""

    size: Annotated[Size, Field(ge=1)] = Field(
        description="Most bytes of the log before the sink, counted in whole segments "
        "(log.segment_bytes); at least 2 segments."
    )
    on_full: Literal["warn", "evict", "disable"] = Field(
        default="warn",
        description="What happens to this sink beyond size. warn: a health event names it. evict: "
        "its cursor moves on, and a gap says over what. disable: it is paused, and the log keeps "
        "nothing more for it, until it is resumed.",
    )
