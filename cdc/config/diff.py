"""What differs between the configuration that runs and another, and how each change takes effect.

Pure. Invariant: a secret that changed is named, and its values are not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final, TypeVar

import orjson
from pydantic import BaseModel

from cdc.config.database import Database
from cdc.config.display import plain
from cdc.config.export import value_of
from cdc.config.model import Config
from cdc.config.sink import SinkConfig

_Named = TypeVar("_Named", Database, SinkConfig)
_SHOWN_MAX: Final = 120
_OF_A_CREATION: Final = (
    "publication.tables",
    "publication.create_if_not_exists",
    "publication.init_sql",
    "slot.create_if_not_exists",
)
"""Keys of a database that its reader does not read."""
RESTART_SECTIONS: Final = ("state", "log", "ledger", "spark", "service")
"""What only a restart of the service changes."""


class Effect(StrEnum):
    """How a change takes effect."""

    AT_ONCE = "at once"
    WORKER = "its worker begins again"
    DATABASE = "its reader and its workers begin again"
    RESTART = "needs a restart of the service"


class ChangeKind(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True)
class KeyChange:
    """A key with its values as they may be shown; None: it is not given."""

    key: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before == self.after:
            return f"{self.key}: another secret"
        return f"{self.key}: {_shown(self.before)} → {_shown(self.after)}"


@dataclass(frozen=True)
class ConfigChange:
    """A sink or a database by its ``name``, or a whole section, which has none."""

    section: str  # sink, database, or one of RESTART_SECTIONS
    name: str
    kind: ChangeKind
    effect: Effect
    keys: tuple[KeyChange, ...] = ()

    def __str__(self) -> str:
        what = f"{self.section} {self.name}".strip()
        keys = "".join(f"\n    {key}" for key in self.keys)
        return f"{what}: {self.kind}, {self.effect}{keys}"


@dataclass(frozen=True)
class ConfigDiff:
    """All changes, databases first."""

    changes: tuple[ConfigChange, ...]

    @property
    def for_restart(self) -> tuple[ConfigChange, ...]:
        """Those that a running service cannot apply."""
        return tuple(each for each in self.changes if each.effect is Effect.RESTART)

    def named(self, section: str, *kinds: ChangeKind) -> list[str]:
        """The names of the sinks, or the databases, that were added, removed or changed."""
        found = (each for each in self.changes if each.section == section)
        return [each.name for each in found if each.kind in kinds]

    @property
    def restarting_databases(self) -> list[str]:
        """Those whose reader and workers begin again."""
        return [each.name for each in self.changes if each.effect is Effect.DATABASE]

    def to_json(self) -> list[dict[str, object]]:
        return [asdict(each) for each in self.changes]


def diff(running: Config, wanted: Config) -> ConfigDiff:
    """What it takes to get from one to the other."""
    found = [*_databases(running, wanted), *_sinks(running, wanted)]
    for section in RESTART_SECTIONS:
        keys = tuple(_keys(getattr(running, section), getattr(wanted, section)))
        if keys:
            found.append(ConfigChange(section, "", ChangeKind.CHANGED, Effect.RESTART, keys))
    return ConfigDiff(tuple(found))


def _databases(running: Config, wanted: Config) -> Iterator[ConfigChange]:
    # Without an address of its own the state is in the first database.
    moves_state = running.state_dsn() != wanted.state_dsn() and running.state == wanted.state
    first = {running.databases[0].name, wanted.databases[0].name} if moves_state else set()
    before, after = _by_name(running.databases), _by_name(wanted.databases)
    for name, kind in _kinds(before, after):
        keys: tuple[KeyChange, ...] = ()
        effect = Effect.AT_ONCE
        if kind is ChangeKind.CHANGED:
            keys = tuple(_keys(before[name], after[name]))
            if not keys:
                if name in first:
                    yield ConfigChange("database", name, kind, Effect.RESTART)
                continue
            if reads_otherwise(before[name], after[name]):
                effect = Effect.DATABASE
        effect = Effect.RESTART if name in first else effect
        yield ConfigChange("database", name, kind, effect, keys)


def reads_otherwise(before: Database, after: Database) -> bool:
    """Whether a reader has to begin again to read a database as it is configured now."""
    return any(each.key not in _OF_A_CREATION for each in _keys(before, after))


def _sinks(running: Config, wanted: Config) -> Iterator[ConfigChange]:
    before, after = _by_name(running.sinks), _by_name(wanted.sinks)
    for name, kind in _kinds(before, after):
        if kind is not ChangeKind.CHANGED:
            yield ConfigChange("sink", name, kind, Effect.AT_ONCE)
            continue
        keys = tuple(_keys(before[name], after[name]))
        if keys:
            served = {before[name].status, after[name].status} == {"active"}
            effect = Effect.WORKER if served else Effect.AT_ONCE
            yield ConfigChange("sink", name, kind, effect, keys)


def _by_name(entries: Sequence[_Named]) -> dict[str, _Named]:
    return {entry.name: entry for entry in entries}


def _kinds(
    before: Mapping[str, object], after: Mapping[str, object]
) -> Iterator[tuple[str, ChangeKind]]:
    for name in {**before, **after}:
        if name not in before:
            yield name, ChangeKind.ADDED
        elif name not in after:
            yield name, ChangeKind.REMOVED
        else:
            yield name, ChangeKind.CHANGED


def _keys(before: BaseModel, after: BaseModel) -> Iterator[KeyChange]:
    old, new = (dict(_leaves(section, "")) for section in (before, after))
    for key in {**old, **new}:
        if key not in old or key not in new or old[key] != new[key]:
            yield KeyChange(key, *(_text(leaves.get(key)) for leaves in (old, new)))


def _leaves(section: BaseModel, prefix: str) -> Iterator[tuple[str, object]]:
    """The values that are given or have a default, by their dotted keys."""
    for key in type(section).model_fields:
        value = value_of(section, key)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value


def _text(value: object) -> str | None:
    if value is None:
        return None
    shown = plain(value)
    return shown if isinstance(shown, str) else orjson.dumps(shown).decode()


def _shown(text: str | None) -> str:
    if text is None:
        return "not given"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
