"""Finding the message on which delivery breaks, so that the others can go on.

A sink says what its destination refused; that is an outcome like any other. This is about the
rest: an unforeseen exception, a Python worker that a message kills. The share is tried once
more, then bisected until one message is left, which is tried again and then counted as dead.
Invariants: messages stay in order; nothing is dead that was not tried alone, and nothing at all
while a share without the message fails too; nothing is sent past a dead message before it is
settled as one: a destination that goes by the last message it has would take it for delivered.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from dataclasses import replace

import structlog

from cdc.bisection import bisect
from cdc.cursor import Cursor
from cdc.error_text import public_raised, public_text
from cdc.errors import CorruptionError, PoisonError, TransientError, WalbrookError
from spark_pipeline.delivery.deliver import Share
from spark_pipeline.delivery.outcome import Outcome, Poison
from spark_pipeline.jvm.jvm_output import said

_logger = structlog.get_logger("walbrook.worker")

# The line behind a traceback's last frame: what was raised.
_RAISED = r"^  (?:File .*|  .*)\n((?:\w+\.)*\w+(?:: .*)?)$"

_OF_JAVA = r"(?:[\w$]+\.)+[\w$]+(?:Exception|Error)(?::|$)"

# Not of a message: no memory, no descriptor, no disk, no connection.
_OF_THE_MACHINE = (OSError, MemoryError)
_CRASHED = "Python worker exited unexpectedly"
_CANCELLED = "[SPARK_JOB_CANCELLED]"

Deliver = Callable[[Share], Outcome]
CursorsOf = Callable[[Share], list[Cursor]]
"""The cursors of the messages of a share, in order."""


def deliver_carefully(deliver: Deliver, share: Share, cursors_of: CursorsOf) -> Outcome:
    """``deliver``, whatever it raises; what is to blame on single messages is left out."""
    for _ in range(2):
        try:
            return deliver(share)
        except Exception as error:
            failure = error
            if not is_suspect(error):
                return _failed(share, as_walbrook_error(error))
    _logger.warning(
        "worker.looking_for_poison", consumer=share.consumer.name, error=as_walbrook_error(failure)
    )
    return _Isolation(deliver).over(share, cursors_of(share))


class _Isolation:
    """One share, delivered in pieces that grow smaller where it breaks."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def over(self, share: Share, cursors: list[Cursor]) -> Outcome:
        """Deliver ``share``, whose messages stand at ``cursors``, up to the first that is dead."""
        done = Outcome(share.consumer.name, share.start)

        def attempt(start: int, stop: int) -> Outcome:
            return self._deliver(_part(share, cursors, start, stop).behind(done))

        try:
            # A share without messages is tried as well: it may send a schema change.
            for start, stop, result in bisect(max(1, len(cursors)), attempt, Exception, is_suspect):
                if isinstance(result, Exception):
                    piece = _part(share, cursors, start, stop).behind(done)
                    result = self._alone(piece, cursors[start:stop])
                done = result.after(done)
                if not done.is_whole:
                    break
        except Exception as error:
            return replace(done, error=as_walbrook_error(error))
        return done

    def _alone(self, piece: Share, within: list[Cursor]) -> Outcome:
        """One message, or none: once more, and then it goes on without it."""
        try:
            return self._deliver(piece)
        except Exception as again:
            error = again
        if not within or not is_suspect(error):
            return _failed(piece, as_walbrook_error(error))
        (message,) = within
        try:
            # The same without the message.
            done = self._deliver(replace(piece, end=message))
        except Exception as broken:
            return _failed(piece, as_walbrook_error(broken))
        if not done.is_whole:
            return done
        _logger.warning("worker.poison", consumer=piece.consumer.name, cursor=str(message))
        why = f"delivery of the change at {message} broke"
        dead = Poison(message, f"{why}: {as_walbrook_error(error).full_text}")
        behind = Cursor(message.lsn, message.idx + 1)
        return Outcome(piece.consumer.name, behind, more=True, dead=(dead,)).after(done)


def _part(share: Share, cursors: list[Cursor], start: int, stop: int) -> Share:
    """The messages ``[start, stop)`` of a share; the first and the last part reach its bounds."""
    if start > 0:
        share = replace(share, start=cursors[start])
    return share if stop >= len(cursors) else replace(share, end=cursors[stop])


def is_suspect(error: Exception) -> bool:
    """Whether a message may be to blame: code that broke, not a fault that was foreseen.

    What comes through Spark is known by its text alone: our own errors by their names, the rest by
    whether Python code raised it or a worker died of it.
    """
    if isinstance(error, WalbrookError):
        return isinstance(error, PoisonError)
    if isinstance(error, _OF_THE_MACHINE):
        return False
    text = str(error)
    if _ours(text):
        return _ours(text)[-1][0] in (PoisonError.__name__, "DecodeError")
    through_spark = "spark" in type(error).__module__ or "py4j" in type(error).__module__
    if raised := re.findall(_RAISED, text, re.MULTILINE):
        kind = getattr(builtins, re.split(r"[.:]", raised[-1].partition(":")[0])[-1], None)
        return not (isinstance(kind, type) and issubclass(kind, _OF_THE_MACHINE))
    return not through_spark or _CRASHED in text


def as_walbrook_error(error: Exception) -> WalbrookError:
    """An error that came through Spark: what our own code said in a worker, or what says most.

    Only damage keeps its class: everything else is tried again all the same. Texts that are not
    ours may quote a row: they are the detail.
    """
    if isinstance(error, WalbrookError):
        return error
    text = str(error).strip()
    if _CRASHED in text:
        return TransientError("the Python worker that was at it died")
    if _CANCELLED in text:
        return TransientError("its Spark job took too long and was cancelled")
    if not (ours := _ours(text)):
        if raised := re.findall(_RAISED, text, re.MULTILINE):
            return TransientError(
                public_raised(raised[-1]), detail=str(raised[-1]).partition(": ")[2]
            )
        line = said(text)
        through_spark = "spark" in type(error).__module__ or "py4j" in type(error).__module__
        public = _of_spark(error, line) if through_spark else public_text(error)
        return TransientError(public, detail="" if line in public else line)
    name, what = ours[-1]
    return CorruptionError(what) if name == CorruptionError.__name__ else TransientError(what)


def _of_spark(error: Exception, line: str) -> str:
    """Its name and, of an error of Java behind it, the class and what of its text is public."""
    name = type(error).__name__
    if re.match(_OF_JAVA, line):
        return f"{name}: {public_raised(line)}"
    return public_raised(f"{name}: {line}")


def _ours(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^cdc\.errors\.(\w+): (.+)$", text, re.MULTILINE)


def _failed(share: Share, error: WalbrookError) -> Outcome:
    return Outcome(share.consumer.name, share.start, error=error)
