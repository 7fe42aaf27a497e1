"""What Spark's JVM and its Python workers write, as events of the service's own log. Pure.

Spark logs through ``log4j2.properties``, one line of fields an event. Everything else that passes
the same way was printed: by the JVM's launcher, by a library, by a Python worker that was stopped
in the middle of something. Invariants: one event is one short line, whatever it was; the text of
an error that may quote a row is left out of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from cdc.error_text import one_line, public_line, public_raised

Level = Literal["debug", "info", "warning", "error"]

_EVENT, _FIELD = "\x02", "\x1f"
_LEVELS: dict[str, Level] = {
    "FATAL": "error",
    "ERROR": "error",
    "WARN": "warning",
    "INFO": "info",
}
_OURS = re.compile(r"^(?:.*: )?cdc\.errors\.\w+: (.+)$", re.MULTILINE)
_CAUSE = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
_BEHIND = re.compile(r"^: (.+)$", re.MULTILINE)  # py4j's own line, then what Java raised
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b")
_CHAINED = ("During handling of the above", "The above exception was")
# A worker that is stopped, or whose task is, finds the other end closed: that is no news.
_USUAL = ("BrokenPipeError", "ConnectionResetError", "EOFError", "KeyboardInterrupt", "SystemExit")
_GRAVE = re.compile(r"OutOfMemoryError|StackOverflowError|fatal error|Exception in thread|Error: ")


@dataclass(frozen=True)
class Event:
    """One line of the service's log."""

    level: Level
    name: str
    fields: dict[str, str] = field(default_factory=dict)


class Noise:
    """Takes lines as they come; a Python traceback becomes an event when it ends."""

    def __init__(self) -> None:
        self._in_traceback = False

    def events(self, line: str) -> Iterator[Event]:
        printed, marked, event = line.rstrip("\r\n").partition(_EVENT)
        if printed.strip():
            yield from self._printed(printed)
        if marked:
            yield _logged(event)

    def _printed(self, line: str) -> Iterator[Event]:
        if line.startswith("Traceback (most recent call last):"):
            self._in_traceback = True
        elif not self._in_traceback:
            level: Level = "warning" if _GRAVE.search(line) else "debug"
            yield Event(level, "spark.printed", {"text": public_line(line)})
        elif not line[0].isspace() and not line.startswith(_CHAINED):
            self._in_traceback = False
            usual = line.startswith(_USUAL) or not _RAISED.match(line)
            level = "debug" if usual else "warning"
            yield Event(level, "spark.worker_raised", {"error": public_raised(line)})


def _logged(event: str) -> Event:
    level, logger, message, thrown = [*event.split(_FIELD), "", "", ""][:4]
    fields = {"logger": logger, "text": public_line(_lines(message).strip().partition("\n")[0])}
    if thrown.strip():
        fields["error"] = _public_said(_lines(thrown))
    return Event(_LEVELS.get(level, "debug"), "spark.log", fields)


def _lines(encoded: str) -> str:
    return encoded.replace("\\r", "").replace("\\n", "\n")


def said(text: str) -> str:
    """The one line of a Java stack that says most: what our own code raised, or the last cause."""
    for found in (_OURS.findall(text), _CAUSE.findall(text), _BEHIND.findall(text)):
        if found:
            return str(found[-1])
    return text.strip().partition("\n")[0]


def _public_said(text: str) -> str:
    """The same without what may quote a row; what our own code raised quotes none."""
    ours = _OURS.findall(text)
    return one_line(ours[-1]) if ours else public_raised(said(text))
