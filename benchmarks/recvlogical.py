"""What the slot can give: ``pg_recvlogical`` into /dev/null, the yardstick of all ratios."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks.source import WrittenRows
from benchmarks.watched import WatchedProgram
from demo.embedded_postgres import EmbeddedPostgres

_TIMEOUT_S = 600.0


def receive(postgres: EmbeddedPostgres, slot: str, load: WrittenRows) -> float:
    """Read the slot up to the end of ``load``; rows a second from the start of streaming."""
    parameters = conninfo_to_dict(postgres.dsn)
    password = str(parameters.pop("password"))
    command = [
        str(postgres.bin_directory / "pg_recvlogical"),
        *("--dbname", make_conninfo("", **parameters), "--slot", slot, "--start", "--no-loop"),
        *("--file", "/dev/null", "--endpos", load.end_lsn, "--verbose"),
        *("--option", "proto_version=1", "--option", f"publication_names={load.publication}"),
    ]
    program = WatchedProgram(
        command,
        begins="streaming initiated",
        ends="end position",
        environment={"PGPASSWORD": password, "LC_ALL": "C"},
    )
    with program:
        return load.rows / program.wait_ended(_TIMEOUT_S)
