"""The error tree.

Every error says what happened and, in ``fix``, what to do next. Its class decides what the product
does with it; that mapping lives with the caller that recovers, never at the place that raises. Its
``kind``, where it has one, is a short name that health events and tests know it by.

Invariant: ``what`` and ``fix``, and so ``str(error)``, quote no value of a row: they are shown in
logs, health and metrics. What may quote one is ``detail``, for ``walbrook.dead_letters`` alone.

    WalbrookError
    ├── TransientError    may pass by itself: retried with backoff
    ├── OperatorError     a person must change something: stop and say what
    │   ├── ConfigError   the configuration file is wrong
    │   │   └── ExpressionError   an expression does not fit a table
    │   ├── SourceError   the source database is not usable as configured
    │   └── GapError      going on would skip changes: never done silently
    ├── PoisonError       one message cannot be handled; the others can
    │   └── DecodeError   bytes that do not say what the protocol says they say
    ├── CorruptionError   a stored frame does not match its checksum
    └── ProtocolError     the server or one of our own stages broke its contract
"""

from __future__ import annotations


class WalbrookError(Exception):
    """What happened (``what``), what to do about it (``fix``), and what only few may read."""

    def __init__(self, what: str, *, fix: str = "", kind: str = "", detail: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.what}. To fix it: {self.fix}" if self.fix else self.what

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (Spark workers); keyword arguments need help with that.
        return (_rebuild, (type(self), self.what, self.fix, self.kind, self.detail))

    @property
    def full_what(self) -> str:
        """What happened, with the detail: it may quote a row."""
        return f"{self.what}: {self.detail}" if self.detail else self.what

    @property
    def full_text(self) -> str:
        """All that is known: it may quote a row."""
        return f"{self.full_what}. To fix it: {self.fix}" if self.fix else self.full_what


def _rebuild(
    error: type[WalbrookError], what: str, fix: str, kind: str, detail: str
) -> WalbrookError:
    return error(what, fix=fix, kind=kind, detail=detail)


NEEDS_OPERATOR, FAILED = 78, 70
"""Exit statuses of a process of the service; 1 is Python's own for a bug."""


def exit_status(error: Exception) -> int:
    """Whether starting the process again can help, or only a person can."""
    by_hand = isinstance(error, OperatorError | CorruptionError)
    return NEEDS_OPERATOR if by_hand else FAILED


class TransientError(WalbrookError):
    """May pass by itself: a dropped connection, a server restarting, a 503."""


class OperatorError(WalbrookError):
    """A person must change something before this can go on."""


class ConfigError(OperatorError):
    """The configuration file is wrong."""


class ExpressionError(ConfigError):
    """A consumer's expression does not fit a table that it takes."""


class SourceError(OperatorError):
    """The source database is not usable as configured."""


class GapError(OperatorError):
    """Going on would skip changes."""


class PoisonError(WalbrookError):
    """One message cannot be handled; the others can."""


class DecodeError(PoisonError):
    """Bytes that do not say what the protocol says they say."""


class CorruptionError(WalbrookError):
    """A stored frame does not match its checksum."""


class ProtocolError(WalbrookError):
    """The server or one of our own stages broke its contract."""
