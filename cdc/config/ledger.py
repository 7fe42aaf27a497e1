"""Where delivered cursors are remembered for sinks that take a repeat for new."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from cdc.config.destination import RedisUrl
from cdc.config.scalars import Integer, Section, wrong


class LedgerSettings(Section):
    """The ledger of delivered cursors, for sinks that take a repeat for new (webhook)."""

    type: Literal["postgres", "redis"] = Field(
        default="postgres", description="postgres: in the state database; redis: at url."
    )
    url: RedisUrl | None = Field(
        default=None, description="Connection URL of the Redis server; for redis alone."
    )
    timeout_ms: Annotated[Integer, Field(ge=1, le=60_000)] = Field(
        default=500,
        description="How long a connect to Redis or its answer may take, in milliseconds; after "
        "two of them delivery goes on without the ledger.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.type == "redis" and self.url is None:
            raise wrong("needs url with type: redis; give one such as redis://host:6379/0")
        if self.type == "postgres" and self.url is not None:
            raise wrong("has a url, which is for type: redis; set the type, or take it out")
        return self
