"""What a sink names of tables that were renamed since. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cdc.config.sink import SinkConfig
from cdc.config.table import TableName


def named_tables(consumer: SinkConfig) -> list[TableName]:
    """All tables that its configuration names to take or to leave out."""
    source = consumer.source
    return [*(source.include_tables or ()), *(source.exclude_tables or ())]


def followed(consumer: SinkConfig, renamed: Mapping[TableName, Sequence[TableName]]) -> SinkConfig:
    """The consumer with the names that its tables have had since. Pure."""
    if not renamed:
        return consumer
    source = consumer.source

    def also(names: Sequence[TableName] | None) -> tuple[TableName, ...] | None:
        if names is None:
            return None
        since = [new for name in names for new in renamed.get(name, ())]
        return tuple(dict.fromkeys([*names, *since]))

    groups = [
        group.model_copy(update={"name": new})
        for group in consumer.tables
        for new in renamed.get(group.name, ())
    ]
    update = {
        "include_tables": also(source.include_tables),
        "exclude_tables": also(source.exclude_tables),
    }
    return consumer.model_copy(
        update={
            "source": source.model_copy(update=update),
            "tables": (*consumer.tables, *groups),
        }
    )
