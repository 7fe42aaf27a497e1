"""PySpark from its folder, where that can be imported, and not from the archives within it.

Spark puts the archives before everything else in a Python worker's path. Modules in an archive are
recompiled in each process, and each task reads the list of all its files again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_ARCHIVES = ("pyspark", "python", "lib")


def without_archives(path: Sequence[str]) -> list[str]:
    """A path without the archives of a package that can be imported from its folder.

    Of a Spark that is installed elsewhere the archives may be all there is of PySpark: they stay.
    """
    return [entry for entry in path if not _is_spare(Path(entry), path)]


def import_unpacked() -> None:
    """Let this process, and its forks, import PySpark from the folder."""
    before = [*sys.path]
    sys.path[:] = without_archives(before)
    for entry in {*before} - {*sys.path}:
        sys.path_importer_cache.pop(entry, None)


def _is_spare(entry: Path, path: Sequence[str]) -> bool:
    if entry.suffix != ".zip" or entry.parent.parts[-3:] != _ARCHIVES:
        return False
    package = entry.parents[2]
    return str(package.parent) in path and (package / "__init__.py").is_file()
