"""Which commands there are, and the group that imports the module of a command when it is used.

Start-up time is the reason: ``walbrook --help`` and the completion of a first word import no
command at all. Invariant: ``COMMANDS`` names every command that there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class LazyCommand:
    """A command, or a group of commands, by the ``typer.Typer`` that holds it."""

    module: str
    app: str
    summary: str


def _operator(summary: str) -> LazyCommand:
    return LazyCommand("operators", "operator_app", summary)


def _listing(summary: str) -> LazyCommand:
    return LazyCommand("listings", "listing_app", summary)


COMMANDS: Final = {
    "init": LazyCommand("init", "init_app", "Look at a database, and write walbrook.yaml."),
    "import": LazyCommand("imports", "import_app", "Write walbrook.yaml from another product's."),
    "doctor": LazyCommand("doctor", "doctor_app", "Look at each source from outside."),
    "run": LazyCommand(
        "run",
        "run_app",
        "Run the service until SIGTERM or Ctrl-C.",
    ),
    "migrate": LazyCommand("run", "run_app", "Bring the schema walbrook up to date."),
    "config": LazyCommand("configuration", "config_app", "Check, print or apply a configuration."),
    "status": LazyCommand("status", "status_app", "Show sources, consumers, cursors and lag."),
    "sources": _listing("List the databases: their readers, slots and logs."),
    "sinks": _listing("List the sinks: what each does, and where it stands."),
    "lag": _listing("List how far sources and sinks are behind."),
    "queue": _listing("List messages that wait."),
    "audit": _listing("List what operators did, the latest first."),
    "pause": _operator("Deliver nothing more to a consumer, for now."),
    "resume": _operator("Serve a paused consumer again, from its cursor on."),
    "rewind": _operator("Deliver everything again from an earlier place on."),
    "skip-to": _operator("Move a consumer forward, giving up what lies before."),
    "redeliver": _operator("Send dead letters again: one, or all that can be."),
    "discard": _operator("Acknowledge dead letters, or give up a message."),
    "discard-all": _operator("Give up all that a consumer has not had."),
    "dead-letters": _operator("List the changes that consumers went on without."),
    "accept-loss": _operator("Take note that a destination lost messages."),
    "advance-watermark": _operator("Wait for nothing at or below a time (event time)."),
    "set-partition-idle": _operator("Let a table hold the watermark back no more."),
    "finish-source": _operator("Wait for nothing more of a database (event time)."),
    "accept-gap": _operator("Go on without the changes that a source lost."),
    "forget": _operator("Remove what is known of a removed sink or database."),
    "backfill": LazyCommand(
        "backfills", "backfill_app", "Deliver rows that exist already to a consumer."
    ),
    "verify": LazyCommand(
        "verify", "verify_app", "Compare what a destination holds with its source."
    ),
    "cancel-verification": LazyCommand("verify", "verify_app", "End a verification."),
    "repair": LazyCommand("repairs", "repair_app", "Bridge what a lost slot has lost."),
    "trace": LazyCommand("trace", "trace_app", "Follow one change from its commit to every sink."),
    "tail": LazyCommand("tail", "tail_app", "Print what a sink would get, as it comes."),
    "log": LazyCommand("log", "log_app", "Look into the change log of a source."),
}
"""In the order in which help lists them."""


class LazyGroup(TyperGroup):
    """The commands of ``COMMANDS``: help and completion see stubs, a call imports the command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, each in COMMANDS.items():
            self.add_command(TyperCommand(name, help=each.summary), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else stub, rest


def load_command(name: str) -> Any:
    """The command of this name; a ``typer.Typer`` may hold several commands, or be the group."""
    where = COMMANDS[name]
    module = import_module(f"cdc.service.cli.{where.module}")
    found: Any = typer.main.get_command(getattr(module, where.app))
    return getattr(found, "commands", {}).get(name, found)
