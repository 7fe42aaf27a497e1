"""A row that nobody can read, in a database without an encoding."""

from __future__ import annotations

from tests.fix_postgres import Database
from tests.log_pipeline import arrived
from tests.walbrook_service import Service


class Unreadable:
    """Two tables of a database without an encoding, which also holds the state."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute("CREATE TABLE item (id int PRIMARY KEY, name text)")
        database.execute("CREATE TABLE other (id int PRIMARY KEY)")
        both, one = ["public.item", "public.other"], ["public.other"]
        self.sinks: list[dict[str, object]] = [
            {
                "name": name,
                "database": "depot",
                "source": {"include_tables": tables},
                "destination": {"type": "file", "path": name},
            }
            for name, tables in {"readable": both, "others": one}.items()
        ]

    def check(self, service: Service) -> None:
        self._database.execute(
            "INSERT INTO item VALUES (1, 'before'), "
            "(2, convert_from('\\x62ff'::bytea, 'SQL_ASCII')), (3, 'beside')"
        )
        self._database.execute("INSERT INTO item VALUES (4, 'after'); INSERT INTO other VALUES (5)")
        service.until_settled(only=["readable", "others"], source=self._database)
        status = service.run("status").stdout

        messages = arrived(service.directory / "readable")
        assert [message["record"]["id"] for message in messages] == [1, 3, 4, 5]
        assert [m["record"]["id"] for m in arrived(service.directory / "others")] == [5]
        ((consumer, table, action, cursor, error, payload),) = service.state.execute(
            "SELECT consumer, table_name, action, commit_lsn || ':' || commit_idx, error, payload "
            "FROM walbrook.dead_letters"
        )
        assert (consumer, table, action) == ("readable", "item", "insert")
        assert "public.item" in error
        assert "name" in error
        assert cursor in error
        assert b"b\xff" in payload
        assert "Dead letters ever: readable 1" in status
        assert "walbrook.dead_letters" in status
        counts = service.state.execute(
            "SELECT name, delivered, dead FROM walbrook.consumers WHERE source = 'depot' ORDER BY 1"
        )
        assert counts == [("others", 1, 0), ("readable", 4, 1)]
