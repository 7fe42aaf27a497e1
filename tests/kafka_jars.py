"""The jars of a Kafka broker and of Kafka Connect's converter: fetched once by Maven.

They lie in the user's cache directory, because they are the same for every checkout. ``python -m
tests.kafka_jars`` fetches them and prints where they are.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

BROKER_RELEASE: Final = "4.3.1"
DEBEZIUM_RELEASE: Final = "3.2.4.Final"

_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_FETCH_TIMEOUT_S = 600
_WHOLE = [
    ("org.apache.kafka", "kafka_2.13", BROKER_RELEASE),
    ("org.apache.kafka", "connect-json", BROKER_RELEASE),
    ("org.apache.kafka", "connect-transforms", BROKER_RELEASE),
]
_ALONE = [  # without what they depend on, which is far more than one class needs
    ("io.debezium", "debezium-core", DEBEZIUM_RELEASE),
    ("io.debezium", "debezium-api", DEBEZIUM_RELEASE),
    ("io.debezium", "debezium-common", DEBEZIUM_RELEASE),
]


class NoJarsError(Exception):
    """The jars are not here and cannot be fetched."""


def kafka_jars() -> Path:
    """The folder with the jars, fetched if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "walbrook"
    folder = cache / f"kafka-connect-{BROKER_RELEASE}-{DEBEZIUM_RELEASE}"
    cache.mkdir(parents=True, exist_ok=True)
    # Several test workers may want them.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _fetch(cache, folder)
    return folder


def _fetch(cache: Path, folder: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise NoJarsError(
            "a Kafka broker cannot be fetched: Maven (mvn) is not installed. Install it (Debian: "
            "apt-get install maven; macOS: brew install maven)"
        )
    print(f"Fetching Kafka {BROKER_RELEASE} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        Path(scratch, "pom.xml").write_text(_pom())
        command = [maven, "-q", "-B", "-C", _COPY, "-DincludeScope=runtime"]
        run = subprocess.run(
            [*command, f"-DoutputDirectory={scratch}/jars"],
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
        )
        if run.returncode != 0 or not list(Path(scratch, "jars").glob("kafka_*.jar")):
            raise NoJarsError(f"Maven did not fetch Kafka:\n{run.stdout}{run.stderr}")
        Path(scratch, "jars").rename(folder)


def _pom() -> str:
    nothing_else = (
        "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>"
        "</exclusions>"
    )
    wanted = [(*one, "") for one in _WHOLE] + [(*one, nothing_else) for one in _ALONE]
    dependencies = "".join(
        f"<dependency><groupId>{escape(group)}</groupId><artifactId>{escape(name)}</artifactId>"
        f"<version>{escape(version)}</version>{rest}</dependency>"
        for group, name, version, rest in wanted
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>walbrook</groupId><artifactId>kafka-of-the-tests</artifactId>"
        f"<version>1</version><dependencies>{dependencies}</dependencies></project>"
    )


if __name__ == "__main__":
    try:
        print(kafka_jars())
    except NoJarsError as missing:
        sys.exit(str(missing))
