"""A real Prometheus, from Debian's package: fetched once, unpacked without any rights, and run."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.waiting import until

_FETCH_TIMEOUT_S = 300


class NoPrometheusError(Exception):
    """The programs are not here and cannot be fetched."""


def program(name: str) -> Path:
    """``prometheus`` or ``promtool``: the one that is installed, else the package's."""
    installed = shutil.which(name)
    if installed is not None:
        return Path(installed)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "walbrook"
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / "prometheus"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            _fetch(cache, place)
    return place / "usr" / "bin" / name


def _fetch(cache: Path, place: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NoPrometheusError(
            "Prometheus is not installed and cannot be fetched without apt-get; install it "
            "(macOS: brew install prometheus)"
        )
    print("Fetching Prometheus ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        _run(["apt-get", "-q", "download", "prometheus"], scratch)
        (package,) = Path(scratch).glob("prometheus_*.deb")
        _run(["dpkg-deb", "-x", str(package), "unpacked"], scratch)
        Path(scratch, "unpacked").rename(place)


def _run(command: Sequence[str], directory: str) -> None:
    run = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S
    )
    if run.returncode != 0:
        raise NoPrometheusError(
            f"{' '.join(command)} failed; if the package lists are empty, run apt-get update:\n"
            f"{run.stdout}{run.stderr}"
        )


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The values now, by their labels."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", answer
        return {
            tuple(sorted(each["metric"].items())): float(each["value"][1])
            for each in answer["data"]["result"]
        }

    def rules(self) -> list[dict[str, Any]]:
        groups = httpx.get(f"{self.url}/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextmanager
def scraping(target: str, rules: Sequence[Path], directory: Path) -> Iterator[Prometheus]:
    """A server that scrapes ``target`` (host:port) once a second and has loaded these rules."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rule) for rule in rules],
        "scrape_configs": [
            {"job_name": "walbrook", "static_configs": [{"targets": [target]}]},
        ],
    }
    config = directory / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(program("prometheus")),
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        try:
            return httpx.get(f"{url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until("Prometheus to be ready", is_ready)
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(30)
