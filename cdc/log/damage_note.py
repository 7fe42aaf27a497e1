"""A note from a reader of the log to its writer: something there does not read back.

Readers do not write into the log. One that meets a damaged frame leaves this note; the writer's
process takes it, looks at everything that is not settled, and fetches again what it can.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cdc.log.files import FILE_MODE

_NOTE = "damaged"


def report_damage(directory: Path) -> None:
    """Leave the note; where that cannot be done, the next reader that meets the damage does."""
    with suppress(OSError):
        (directory / _NOTE).touch(FILE_MODE)


def take_damage_report(directory: Path) -> bool:
    """Whether damage was reported since this was last asked."""
    try:
        (directory / _NOTE).unlink()
    except OSError:
        return False
    return True
