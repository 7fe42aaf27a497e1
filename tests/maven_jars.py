"""Jars that tests need beside Spark's own: fetched once by Maven.

They lie in the user's cache directory, because they are the same for every checkout.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_FETCH_TIMEOUT_S = 600
_NOTHING_ELSE: Final = (
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
)


class NoJarsError(Exception):
    """The jars are not here and cannot be fetched."""


@dataclass(frozen=True)
class Jar:
    """``alone``: without what it depends on."""

    group: str
    name: str
    version: str
    alone: bool = False
    classifier: str = ""

    def dependency(self) -> str:
        """The dependency as a ``pom.xml`` has it."""
        classifier = f"<classifier>{escape(self.classifier)}</classifier>"
        return (
            f"<dependency><groupId>{escape(self.group)}</groupId>"
            f"<artifactId>{escape(self.name)}</artifactId><version>{escape(self.version)}</version>"
            f"{classifier if self.classifier else ''}{_NOTHING_ELSE if self.alone else ''}"
            "</dependency>"
        )


def fetched(name: str, jars: Sequence[Jar]) -> Path:
    """The folder of this name with the jars, fetched if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "walbrook"
    cache.mkdir(parents=True, exist_ok=True)
    # Several test workers may want them.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (cache / name).exists():
            _fetch(cache, name, jars)
    return cache / name


def _fetch(cache: Path, name: str, jars: Sequence[Jar]) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise NoJarsError(
            f"{name} cannot be fetched: Maven (mvn) is not installed. Install it (Debian: "
            "apt-get install maven; macOS: brew install maven)"
        )
    print(f"Fetching {name} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        Path(scratch, "pom.xml").write_text(_pom(jars))
        command = [maven, "-q", "-B", "-C", _COPY, "-DincludeScope=runtime"]
        run = subprocess.run(
            [*command, f"-DoutputDirectory={scratch}/jars"],
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
        )
        lacking = [jar.name for jar in jars if not list(Path(scratch).glob(f"jars/{jar.name}*"))]
        if run.returncode != 0 or lacking:
            raise NoJarsError(f"Maven did not fetch {name}:\n{run.stdout}{run.stderr}")
        Path(scratch, "jars").rename(cache / name)


def _pom(jars: Sequence[Jar]) -> str:
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>walbrook</groupId><artifactId>jars-of-the-tests</artifactId>"
        "<version>1</version><dependencies>"
        f"{''.join(jar.dependency() for jar in jars)}</dependencies></project>"
    )
