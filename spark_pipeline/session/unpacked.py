"""PySpark from its folder, where it is installed as a package, and not from the archives in it.

Spark puts the archives before everything else in a Python worker's path. Modules in an archive are
compiled anew in each process, and each task reads the list of all its files again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_ARCHIVES = Path("pyspark", "python", "lib")


def without_archives(path: Sequence[str]) -> list[str]:
    """A path without the archives that lie within an installed package.

    Of a Spark that is installed on its own the archives may be all there is of PySpark: they stay.
    """
    return [entry for entry in path if not _is_spare(Path(entry))]


def import_unpacked() -> None:
    """Let this process, and its forks, import PySpark from the folder."""
    sys.path[:] = kept = without_archives(sys.path)
    for entry in sys.path_importer_cache.keys() - {*kept}:
        if _is_spare(Path(entry)):
            del sys.path_importer_cache[entry]


def _is_spare(entry: Path) -> bool:
    within = entry.suffix == ".zip" and entry.parent.parts[-3:] == _ARCHIVES.parts
    return within and (entry.parents[2] / "__init__.py").is_file()
