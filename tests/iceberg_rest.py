"""A REST catalog: the server that Apache Iceberg's own tests of the protocol run against."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from cdc.service.process.java import find_java
from demo.loopback import LOOPBACK, free_port
from tests.maven_jars import Jar, fetched
from tests.waiting import until

_RELEASE: Final = "1.10.0"
_HADOOP, _JETTY = "3.4.2", "11.0.26"
_JARS = (
    Jar("org.apache.iceberg", "iceberg-open-api", _RELEASE, classifier="test-fixtures"),
    Jar("org.apache.iceberg", "iceberg-core", _RELEASE),
    Jar("org.apache.iceberg", "iceberg-core", _RELEASE, alone=True, classifier="tests"),
    Jar("org.eclipse.jetty", "jetty-servlet", _JETTY),
    Jar("org.xerial", "sqlite-jdbc", "3.50.3.0"),
    Jar("org.apache.hadoop", "hadoop-client-api", _HADOOP, alone=True),
    Jar("org.apache.hadoop", "hadoop-client-runtime", _HADOOP, alone=True),
)


@contextmanager
def rest_catalog() -> Iterator[str]:
    """The URL of a server with an empty catalog."""
    jars = fetched(f"iceberg-rest-{_RELEASE}", _JARS)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="walbrook-test-rest-") as directory:
        log = Path(directory, "log")
        environment = {
            "CATALOG_WAREHOUSE": f"file://{directory}/warehouse",
            "CATALOG_URI": f"jdbc:sqlite:{directory}/catalog.db",
            "CATALOG_REST_PORT": str(port),
        }
        java = [str(find_java() / "bin" / "java"), "-Xmx256m", "-XX:TieredStopAtLevel=1"]
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*java, "-cp", f"{jars}/*", "org.apache.iceberg.rest.RESTCatalogServer"],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        url = f"http://{LOOPBACK}:{port}"

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"{url}/v1/config").is_success
            except httpx.TransportError:
                return False

        try:
            until("the REST catalog", answers, 60)
            yield url
        finally:
            process.kill()
            process.wait(30)
