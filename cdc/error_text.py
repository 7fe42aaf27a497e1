"""What may be shown of an error: in logs, health, metrics, status and the state tables.

Invariant: no text from here quotes a value of a row. Our own errors keep what may quote one in
``detail``, which this module never reads. The texts of other errors are shown only where they
cannot hold one: faults of the machine and of connections. Of all others the class is shown and
where it was raised.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Final

import psycopg

from cdc.errors import WalbrookError

_ROOT: Final = Path(__file__).parents[1]
_TEXT_MAX: Final = 400
_SCANNED_MAX: Final = 2_000
"""Characters of a line that are looked at: more of it is not shown, whatever stands there."""
_FRAMES_MAX: Final = 20
_QUOTING_STATES: Final = ("22", "23")
"""Classes of SQLSTATE whose messages quote what was sent: data and integrity errors."""

SAFE_CLASSES: Final = (
    r"(?:OSError|IOError|ConnectionError|ConnectionRefusedError|ConnectionResetError"
    r"|BrokenPipeError|TimeoutError|FileNotFoundError|PermissionError|MemoryError|ImportError"
    r"|ModuleNotFoundError|EOFError|Py4JNetworkError|OutOfMemoryError|StackOverflowError"
    r"|IOException|FileNotFoundException|NoSuchFileException|FileSystemException"
    r"|ConnectException|UnknownHostException|BindException|SocketException"
    r"|ClassNotFoundException|NoClassDefFoundError|UnsatisfiedLinkError)"
)
"""Errors of Python and of Java that speak of the machine, and so quote no row."""

_RAISED: Final = re.compile(r"\b(?:[\w$]+\.)*([A-Za-z_$][\w$]*(?:Exception|Error))\b")
_CONDITION: Final = re.compile(r"^: (\[[A-Z][A-Z0-9_.]*\])")
_NAME: Final = re.compile(r"[\w.$]+")
_SAFE: Final = re.compile(SAFE_CLASSES)
_OURS: Final = "cdc.errors."


def public_text(error: BaseException) -> str:
    """An error in one line that quotes no row."""
    if isinstance(error, WalbrookError):
        return str(error).strip()
    if isinstance(error, psycopg.Error):
        return _of_postgres(error)
    name = type(error).__name__
    if isinstance(error, OSError | MemoryError | ImportError) or _SAFE.fullmatch(name):
        return one_line(f"{name}: {error}" if str(error) else name)
    return public_raised(f"{name}: {error}") + _where(error)


def public_raised(text: str) -> str:
    """What a traceback ends with, ``name: text``: the name, and the text if it quotes no row."""
    line = " ".join(text.split())
    name = line.partition(": ")[0]
    plain = name.rpartition(".")[2]
    if not _NAME.fullmatch(name) or name.startswith(_OURS) or _SAFE.fullmatch(plain):
        return public_line(line)
    condition = _CONDITION.match(line[len(name) :])
    return one_line(name + (f" {condition[1]}" if condition else ""))


def public_line(text: str) -> str:
    """One line of a log or a traceback, cut behind the first error whose text may quote a row.

    Errors of Spark keep their condition, such as ``[CAST_INVALID_INPUT]``. Our own are public.
    """
    line = " ".join(text.split())[:_SCANNED_MAX]
    for found in _RAISED.finditer(line):
        if found[0].startswith(_OURS):
            break
        if not _SAFE.fullmatch(found[1]):
            condition = _CONDITION.match(line[found.end() :])
            return one_line(line[: found.end()] + (f" {condition[1]}" if condition else ""))
    return one_line(line)


def stack_of(error: BaseException) -> str:
    """Where an error was raised, innermost first, without its text or its values."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES_MAX:]
    return " < ".join(f"{_place(frame)} {frame.name}" for frame in reversed(frames))


def _of_postgres(error: psycopg.Error) -> str:
    name, state = type(error).__name__, error.sqlstate or ""
    if state.startswith(_QUOTING_STATES):
        return f"{name} (SQLSTATE {state}){_where(error)}"
    # Details and contexts quote rows; the first message does not.
    return one_line(error.diag.message_primary or f"{name}: {error}" if str(error) else name)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {_place(frames[-1])}" if frames else ""


def _place(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else Path(path.name)
    return f"{shown}:{frame.lineno}"


def one_line(text: str) -> str:
    """A text that quotes no row, short and in one line."""
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}…"
