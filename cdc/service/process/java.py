"""The Java that Spark is to run on, found before anything starts.

Spark asks for Java 17 or later with the module ``jdk.incubator.vector``, which the slimmest builds
leave out, and without it fails with a page of Java's own words. Invariant: after
``require_java`` the variable JAVA_HOME names a Java that will do, also for child processes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from cdc.errors import OperatorError

OLDEST_VERSION = 17
MODULE = "jdk.incubator.vector"
ANSWER_TIMEOUT_S = 10.0
HOMES_MAX = 20
# Debian's and Fedora's place, the versions Spark is used with most first; Homebrew's; Apple's.
PLACES = (
    "/usr/lib/jvm/*17*",
    "/usr/lib/jvm/*21*",
    "/usr/lib/jvm/*",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/usr/local/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
)

_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"^java\.base@(\d+)", re.MULTILINE)
_MODULE = re.compile(rf"^{re.escape(MODULE)}(@|$)", re.MULTILINE)


def require_java() -> None:
    """Point JAVA_HOME to a Java that Spark can run on, or say how to get one."""
    os.environ["JAVA_HOME"] = str(find_java())


def find_java(environ: Mapping[str, str] = os.environ, places: tuple[str, ...] = PLACES) -> Path:
    """The home of the first Java that will do: JAVA_HOME's, the PATH's, then an installed one."""
    seen: set[Path] = set()
    for program in _programs(environ, places):
        real = program.resolve()
        if real in seen or len(seen) >= HOMES_MAX:
            continue
        seen.add(real)
        home = _home_if_usable(program)
        if home is not None:
            return home
    found = f"; what is there ({len(seen)} found) is older or lacks it" if seen else ""
    raise OperatorError(
        f"Spark needs Java {OLDEST_VERSION} or later with the module {MODULE}, and none was "
        f"found{found}",
        fix="apt-get install openjdk-17-jre-headless (macOS: brew install openjdk@17), or set "
        "JAVA_HOME to where one is",
    )


def _programs(environ: Mapping[str, str], places: tuple[str, ...]) -> Iterator[Path]:
    given = environ.get("JAVA_HOME")
    if given:
        yield Path(given, "bin", "java")
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path)
    for place in places:
        folder = Path(place).anchor
        for home in sorted(Path(folder).glob(str(Path(place).relative_to(folder)))):
            yield home / "bin" / "java"


def _home_if_usable(program: Path) -> Path | None:
    """Ask Java itself where it lives: the program may be a link or a wrapper."""
    if not os.access(program, os.X_OK):
        return None
    try:
        answer = subprocess.run(
            [program, "-XshowSettings:properties", "--list-modules"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    home, version = _HOME.search(answer), _VERSION.search(answer)
    usable = version is not None and int(version[1]) >= OLDEST_VERSION and _MODULE.search(answer)
    return Path(home[1]) if home is not None and usable else None
