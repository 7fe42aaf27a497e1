"""The HTTP server with its API, over a database of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
import yaml
from starlette.applications import Starlette

from cdc.config import Http
from cdc.service.http.api.operators import operator_routes
from cdc.service.http.api.tokens import Access
from tests.fix_postgres import Database
from tests.operators import Operator
from tests.waiting import until
from tests.walbrook_service import _url


@contextmanager
def served(state_dsn: str) -> Iterator[httpx.Client]:
    """A real server with the operators' routes, and a client of it."""
    application = Starlette(routes=operator_routes(state_dsn, Access(Http())))
    server = uvicorn.Server(
        uvicorn.Config(application, port=0, log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until("the server", lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/consumers") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def operator(database: Database) -> Iterator[Operator]:
    with database.connect() as connection:
        yield Operator(database, connection)


@pytest.fixture
def client(operator: Operator) -> Iterator[httpx.Client]:
    with served(operator.database.dsn) as client:
        yield client


@pytest.fixture
def config(operator: Operator, tmp_path: Path) -> Path:
    path = tmp_path / "walbrook.yaml"
    settings = {
        "databases": [
            {
                "name": "shop",
                "url": _url(operator.database.dsn),
                "slot": {"name": "slot"},
                "publication": {"name": "pub"},
            }
        ],
        "sinks": [{"name": "hook", "destination": {"type": "file", "path": "files"}}],
    }
    path.write_text(yaml.safe_dump(settings))
    return path
