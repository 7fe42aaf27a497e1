"""A real standalone Spark cluster on this machine: a master and workers, each a JVM of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pyspark

from spark_pipeline.session.session import CLASS_ARCHIVE, class_archive_option
from tests.waiting import until

ROOT = Path(__file__).parents[1]
_SPARK_HOME = Path(pyspark.__file__).parent
_START_S = 60.0

QUICK_START = f"-XX:TieredStopAtLevel=1 {class_archive_option(CLASS_ARCHIVE)}".strip()
"""For a JVM that lives for a minute."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class StandaloneCluster:
    """A master with workers of one core each; executors are started as Spark starts them."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        self._master = self._start("master.Master", "--port", str(self._port))
        until("the master", lambda: "alive" in self._said("master.Master").lower(), _START_S)
        self.workers = [self._worker(number) for number in range(workers)]
        until("its workers", lambda: self._registered() == workers, _START_S)

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def executors(self) -> list[psutil.Process]:
        """The executors' JVMs, in the workers' order."""
        found = []
        for worker in self.workers:
            if worker.poll() is None:
                for child in psutil.Process(worker.pid).children(recursive=True):
                    if _is_executor(child):
                        found.append(child)
        return found

    def kill_worker(self, number: int) -> None:
        """SIGKILL a worker, its executor and the Python of that, as if its machine were lost."""
        tree = psutil.Process(self.workers[number].pid)
        for process in [tree, *tree.children(recursive=True)]:
            process.kill()
        self.workers[number].wait(30)

    def add_worker(self) -> None:
        self.workers.append(self._worker(len(self.workers)))

    def stop(self) -> None:
        for process in [*self.workers, self._master]:
            tree = [psutil.Process(process.pid)] if process.poll() is None else []
            tree += [child for one in tree for child in one.children(recursive=True)]
            for one in tree:
                one.kill()
            process.wait(30)

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        options = ["--cores", "1", "--memory", "1g"]
        work = ["--work-dir", str(self._directory / f"work-{number}")]
        return self._start("worker.Worker", *options, *work, self.url)

    def _start(self, role: str, *arguments: str) -> subprocess.Popen[bytes]:
        program = [str(_SPARK_HOME / "bin/spark-class"), f"org.apache.spark.deploy.{role}"]
        places = ["--host", "127.0.0.1", "--webui-port", str(free_port())]
        environment = {
            "SPARK_HOME": str(_SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._directory / "scratch"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_START,
            "PYSPARK_PYTHON": sys.executable,
        }
        with self._log(role).open("ab") as log:
            return subprocess.Popen(
                [*program, *places, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            )

    def _registered(self) -> int:
        return self._said("worker.Worker").count("Successfully registered with master")

    def _said(self, role: str) -> str:
        return self._log(role).read_text(errors="replace")

    def _log(self, role: str) -> Path:
        return self._directory / f"{role}.log"


def _is_executor(process: psutil.Process) -> bool:
    try:
        return "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
