"""What a service would have to do to run another configuration file; nothing is changed here.

Invariant: a plan that exists can be applied: the file is valid, what is new in it fits the sources,
and nothing in it needs a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from cdc.config import Config
from cdc.config.diff import ChangeKind, ConfigChange, ConfigDiff, diff
from cdc.config.extras import check_extras
from cdc.errors import OperatorError
from cdc.service.checks.connections import check_database
from cdc.service.checks.event_time import check_event_time
from cdc.service.checks.expressions import check_expressions
from cdc.service.checks.groups import check_groups
from cdc.service.live_config.file import ConfigFile

_logger = structlog.get_logger("walbrook.config")


@dataclass(frozen=True)
class ConfigPlan:
    """``file`` is what would run; ``left_out`` is what only a restart would change."""

    file: ConfigFile
    diff: ConfigDiff
    left_out: tuple[ConfigChange, ...]
    unchecked: tuple[str, ...]

    @property
    def concerned(self) -> Config:
        """The configuration with those sinks alone active that are new or changed."""
        return _concerned(self.file.config, self.diff)

    @property
    def begun_databases(self) -> list[str]:
        """The databases of which a reader begins."""
        return [*self.diff.named("database", ChangeKind.ADDED), *self.diff.restarting_databases]

    @property
    def ended_databases(self) -> list[str]:
        """The databases of which the reader ends."""
        return [*self.diff.named("database", ChangeKind.REMOVED), *self.diff.restarting_databases]

    def __str__(self) -> str:
        lines = [str(change) for change in self.diff.changes]
        lines += [f"left out: {change}" for change in self.left_out]
        lines += [f"not checked: {what}" for what in self.unchecked]
        return "\n".join(lines) or "nothing differs from what runs"


def plan_config(running: ConfigFile, *, partly: bool) -> ConfigPlan:
    """Compare the file with what runs. OperatorError says why it cannot be applied.

    ``partly`` leaves out what needs a restart, in place of refusing it.
    """
    wanted = ConfigFile.read(running.path)
    found = diff(running.config, wanted.config)
    left_out = found.for_restart
    if left_out and partly:
        wanted = running.with_changes_of(wanted)
        found = diff(running.config, wanted.config)
    if found.for_restart:
        changes = "\n".join(map(str, found.for_restart))
        raise OperatorError(
            f"{running.path} cannot be applied to the running service:\n{changes}",
            fix="restart the service, or take these changes back"
            + ("" if partly else ", or leave them out with --partly (partly => true)"),
        )
    concerned = _concerned(wanted.config, found)
    check_extras(sink for sink in concerned.sinks if sink.status == "active")
    unchecked = [
        *check_groups(concerned),
        *check_event_time(concerned),
        *check_expressions(concerned, wanted.path),
    ]
    for name in [*found.named("database", ChangeKind.ADDED), *found.restarting_databases]:
        check_database(wanted.config, wanted.config.database(name))
    return ConfigPlan(wanted, found, left_out, tuple(unchecked))


def changed_since(read: ConfigFile) -> ConfigFile:
    """A file that was read a while ago as it is now, for a service that begins.

    Changes may have been applied to the service that ran meanwhile: what it served is served on.
    What only a restart changes stays as it was read, and so does all of a file that is wrong now.
    """
    try:
        now = ConfigFile.read(read.path)
        if left_out := diff(read.config, now.config).for_restart:
            _logger.warning("config.left_out", changes=[str(change) for change in left_out])
            now = read.with_changes_of(now)
        check_extras(sink for sink in now.config.sinks if sink.status == "active")
    except OperatorError as error:
        _logger.error("config.wrong", error=error)
        return read
    return read if diff(read.config, now.config).for_restart else now


def _concerned(config: Config, changes: ConfigDiff) -> Config:
    names = changes.named("sink", ChangeKind.ADDED, ChangeKind.CHANGED)
    sinks = [
        sink if sink.name in names else sink.model_copy(update={"status": "disabled"})
        for sink in config.sinks
    ]
    return config.model_copy(update={"sinks": sinks})
