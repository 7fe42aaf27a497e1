"""The service over two databases whose changes one consumer gets in event-time order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.fix_postgres import Database
from tests.walbrook_service import Service, _url

EVENTS = """
CREATE TABLE event (id bigint PRIMARY KEY, at timestamptz NOT NULL, origin text NOT NULL)
"""


class MergedService(Service):
    """``first`` also holds the state, unless another database is given for it."""

    def __init__(
        self,
        first: Database,
        second: Database,
        directory: Path,
        sinks: list[dict[str, object]],
        *,
        settings: Mapping[str, Mapping[str, object]] | None = None,
        state: Database | None = None,
    ) -> None:
        self.second = second
        super().__init__(first, directory, sinks, settings)
        if state is not None:
            self.state = state
            self.configure({"state": {"url": _url(state.dsn)}})

    def _configuration(self, sinks: list[dict[str, object]]) -> dict[str, object]:
        config = super()._configuration(sinks)
        config["databases"] = [
            {
                "name": name,
                "url": _url(database.dsn),
                "slot": {"name": f"slot_{database.name}"[:63], "create_if_not_exists": True},
                "publication": {"name": "pub", "create_if_not_exists": True},
            }
            for name, database in (("shop", self.database), ("depot", self.second))
        ]
        return config

    def until_read(self) -> None:
        """Until all that was committed is in the change logs."""
        for name, database in (("shop", self.database), ("depot", self.second)):
            ((lsn,),) = database.execute("SELECT pg_logical_emit_message(true, 'test', 'mark')")
            self.until(
                f"{name} read up to {lsn}",
                f"SELECT log_lsn >= '{lsn}'::pg_lsn FROM walbrook.sources WHERE name = '{name}'",
            )

    def until_serving(self) -> None:
        self.until("the state schema", "SELECT to_regclass('walbrook.event_time') IS NOT NULL")
        self.until(
            "both readers",
            "SELECT count(*) = 2 AND bool_and(state = 'streaming') FROM walbrook.sources",
        )
