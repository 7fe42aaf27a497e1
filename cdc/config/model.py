"""The whole configuration, and what must hold between its sections.

Names are unique, and every sink reads a database that is there. ``name_problems`` decides that for
the model and for the loader alike, so that a person sees these problems beside all others even
when the rest of the file is not valid yet.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from cdc.config.database import Database
from cdc.config.destination import PullDestination
from cdc.config.hosts import is_cluster, is_loopback, is_on_this_host
from cdc.config.ledger import LedgerSettings
from cdc.config.log import Log
from cdc.config.scalars import Section, wrong
from cdc.config.settings import Service, Spark, State
from cdc.config.sink import BOTH_WAYS, SinkConfig
from cdc.errors import OperatorError

Location = tuple[str | int, ...]


class SinkNames(NamedTuple):
    """What a sink says of names: its own, and those of what it reads, as the file has them."""

    name: object
    database: object = None
    databases: object = None


class Config(Section):
    """A valid configuration."""

    databases: list[Database] = Field(min_length=1, description="The source databases.")
    sinks: list[SinkConfig] = Field(
        default_factory=list, description="The sinks, each one a consumer."
    )
    state: State = Field(
        default_factory=State, description="Where Walbrook keeps its cursors and queues."
    )
    log: Log = Field(default_factory=Log, description="The change log on disk.")
    ledger: LedgerSettings = Field(
        default_factory=LedgerSettings,
        description="Where delivered cursors are remembered for sinks that need it.",
    )
    spark: Spark = Field(default_factory=Spark, description="The Spark session.")
    service: Service = Field(default_factory=Service, description="The running process.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        # Sections left out are read as empty ones, so that their default paths are resolved too.
        sections: dict[str, object] = {key: {} for key in ("log", "spark") if data.get(key) is None}
        return {**data, **sections, **_sinks_with_database(data)}

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = [database.name for database in self.databases]
        problems = name_problems(names, [_names_of(sink) for sink in self.sinks])
        if problems:
            raise wrong("; ".join(f"{format_location(at)}: {what}" for at, what in problems))
        return self

    @model_validator(mode="after")
    def _a_place_each(self) -> Self:
        """Sinks that keep their position at the destination cannot share one."""
        first: dict[tuple[object, ...], int] = {}
        for i, sink in enumerate(self.sinks):
            place = sink.destination.place(sink.name)
            if place is not None and first.setdefault(place, i) != i:
                raise wrong(
                    f"is where sinks[{first[place]}] writes too; give it its own",
                    within=("sinks", i, "destination"),
                )
        return self

    @model_validator(mode="after")
    def _backlogs_have_room(self) -> Self:
        """Backlogs are counted in segments, the one that a sink reads left out."""
        for i, sink in enumerate(self.sinks):
            backlog = sink.max_backlog
            if backlog is not None and backlog.size < 2 * self.log.segment_bytes:
                raise wrong(
                    "is less than 2 × log.segment_bytes; raise it or lower the other",
                    within=("sinks", i, "max_backlog", "size"),
                )
        return self

    @model_validator(mode="after")
    def _executors_reach_the_log(self) -> Self:
        """Executors elsewhere read the log through its server, so there must be one for them."""
        flight = self.log.flight
        if not is_cluster(self.spark.master):
            return self
        if not flight.enabled and "enabled" in flight.model_fields_set:
            raise wrong(
                "is false, but executors of a cluster read the log through its server; leave it "
                "out, or set spark.master to local[*]",
                within=("log", "flight", "enabled"),
            )
        if is_loopback(flight.advertised) and not is_on_this_host(self.spark.master):
            raise wrong(
                "is an address that executors on other machines cannot reach; set host, or "
                "advertise, to one of this host's that they can",
                within=("log", "flight", "host"),
            )
        return self

    @model_validator(mode="after")
    def _claimers_reach_the_api(self) -> Self:
        """What pull consumers hold is not open to anyone who finds the port."""
        pulls = any(isinstance(sink.destination, PullDestination) for sink in self.sinks)
        http = self.service.http
        if pulls and http.enabled and not http.serves_api:
            raise wrong(
                "is an address that other machines reach, and there are no tokens; give "
                "service.http.tokens, or listen on 127.0.0.1",
                within=("service", "http", "host"),
            )
        return self

    @property
    def serves_log(self) -> bool:
        """Whether the log is served to other machines."""
        return self.log.flight.enabled or is_cluster(self.spark.master)

    def database(self, name: str) -> Database:
        """The database called ``name``."""
        for database in self.databases:
            if database.name == name:
                return database
        raise OperatorError(
            f"there is no database '{name}'",
            fix=f"name one of {', '.join(database.name for database in self.databases)}",
        )

    def sinks_of(self, database_name: str) -> list[SinkConfig]:
        """The sinks that read this database, disabled ones included, in the file's order."""
        return [sink for sink in self.sinks if database_name in sink.sources]

    def state_dsn(self) -> str:
        """How to reach the state database, password included."""
        if self.state.url is not None:
            return self.state.url.get_secret_value()
        return self.databases[0].dsn()

    def state_called(self) -> str:
        """How a message names the state database; without an address of its own it is a source."""
        if self.state.url is not None:
            return "the state database"
        return f"database {self.databases[0].name}, which also holds the state,"


def name_problems(
    databases: Sequence[object], sinks: Sequence[SinkNames]
) -> list[tuple[Location, str]]:
    """What is wrong between names: of databases, and of sinks each with what it reads.

    Names that are not text are left to the model's own checks.
    """
    problems = _repeated("databases", databases)
    problems += _repeated("sinks", [sink.name for sink in sinks])
    known = [name for name in databases if isinstance(name, str)]
    for i, sink in enumerate(sinks):
        at: Location = ("sinks", i, "database")
        if sink.databases is not None:
            problems += _several(i, sink, known)
        elif sink.database is None and len(databases) > 1:
            problems.append((at, f"is required; name one of {', '.join(known)}"))
        else:
            problems += _unknown(at, sink.database, known)
    return problems


def _several(i: int, sink: SinkNames, known: Sequence[str]) -> list[tuple[Location, str]]:
    at: Location = ("sinks", i, "databases")
    if sink.database is not None:
        return [(at, BOTH_WAYS)]
    names = list(sink.databases) if isinstance(sink.databases, list | tuple) else []
    problems: list[tuple[Location, str]] = []
    for k, name in enumerate(names):
        problems += _unknown((*at, k), name, known)
        if isinstance(name, str) and name in names[:k]:
            problems.append(((*at, k), "is there twice; name each database once"))
    return problems


def _unknown(at: Location, name: object, known: Sequence[str]) -> list[tuple[Location, str]]:
    if not isinstance(name, str) or not known or name in known:
        return []
    return [(at, f"there is no database '{name}'; {suggestion(name, known)}")]


def suggestion(wrong_word: str, known: Sequence[str]) -> str:
    """The nearest known word, or all of them."""
    near = difflib.get_close_matches(wrong_word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"


def format_location(location: Location) -> str:
    """``sinks[1].destination.stream_key``."""
    path = ""
    for part in location:
        # A key such as "password:word", a forgotten space, must not be repeated as a whole.
        path += f"[{part}]" if isinstance(part, int) else f".{part.partition(':')[0]}"
    return path.removeprefix(".")


def _repeated(kind: str, names: Sequence[object]) -> list[tuple[Location, str]]:
    first: dict[str, int] = {}
    problems: list[tuple[Location, str]] = []
    for i, name in enumerate(names):
        if isinstance(name, str) and first.setdefault(name, i) != i:
            what = f"'{name}' is already the name of {kind}[{first[name]}]; choose another"
            problems.append(((kind, i, "name"), what))
    return problems


def _sinks_with_database(data: dict[str, object]) -> dict[str, object]:
    """The sinks, each that names no database given the only one there is."""
    databases, sinks = data.get("databases"), data.get("sinks")
    if not (isinstance(databases, list) and len(databases) == 1 and isinstance(sinks, list)):
        return {}
    only = databases[0]
    name = only.get("name") if isinstance(only, dict) else getattr(only, "name", None)
    # A database without a usable name is one problem, not one more for every sink.
    filling = {"database": name if isinstance(name, str) and name else "unnamed"}
    return {"sinks": [{**sink, **filling} if _names_none(sink) else sink for sink in sinks]}


def _names_none(sink: object) -> bool:
    return isinstance(sink, dict) and sink.get("database") is sink.get("databases") is None


def _names_of(sink: SinkConfig) -> SinkNames:
    # The model fills in database where databases are given.
    return SinkNames(sink.name, None if sink.databases else sink.database, sink.databases)
