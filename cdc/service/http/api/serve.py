"""The API as the HTTP server carries it: its routes, and what lives as long as the server's loop.

More to serve under ``/api`` are more routes in ``routes``, made by ``guarded``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cdc.config import Config, Http
from cdc.errors import ProtocolError
from cdc.service.http.api.backfills import backfill_routes
from cdc.service.http.api.bodies import answer
from cdc.service.http.api.configuration import config_routes
from cdc.service.http.api.openapi import document
from cdc.service.http.api.operators import operator_routes
from cdc.service.http.api.pull import PullApi, pull_routes
from cdc.service.http.api.repairs import BeginRepair, repair_routes
from cdc.service.http.api.routes import About, guarded
from cdc.service.http.api.tokens import Access
from cdc.service.http.api.traces import trace_routes
from cdc.service.http.api.verifications import verification_routes


class Api:
    """Made with the server; begins to work with the server's event loop."""

    def __init__(
        self,
        settings: Http,
        state_dsn: str,
        begin_repair: BeginRepair | None = None,
        config: Callable[[], Config] | None = None,
    ) -> None:
        """``begin_repair`` knows the sources; without it no repair can be asked for.

        ``config`` says whose changes can be traced; without it none can be.
        """
        self._config = config
        self._dsn = state_dsn
        self._begin_repair = begin_repair
        self._access = Access(settings)
        self._pull: PullApi | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def routes(self) -> list[BaseRoute]:
        routes = [
            *pull_routes(self._pulling, self._access),
            *operator_routes(self._dsn, self._access),
            *backfill_routes(self._dsn, self._access),
            *config_routes(self._dsn, self._access),
            *(
                []
                if self._begin_repair is None
                else repair_routes(self._dsn, self._access, self._begin_repair)
            ),
            *verification_routes(self._dsn, self._access),
            *([] if self._config is None else trace_routes(self._config, self._dsn, self._access)),
        ]

        async def openapi(_request: Request) -> Response:
            return answer(document([*routes, described]))

        described = guarded(
            "/api/openapi.json",
            openapi,
            self._access,
            methods=("GET",),
            operates=True,
            about=About("This document.", answer="An OpenAPI document."),
        )
        return [*routes, described]

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """What is open while the server runs."""
        self._loop = asyncio.get_running_loop()
        self._pull = PullApi(self._dsn)
        try:
            yield
        finally:
            self._loop = None
            await self._pull.close()

    def stop_waiting(self) -> None:
        """Answer those that wait; from any thread, before the server is stopped."""
        if self._loop is not None and self._pull is not None:
            self._loop.call_soon_threadsafe(self._pull.claims.stop_waiting)

    def _pulling(self) -> PullApi:
        if self._pull is None:
            raise ProtocolError("the API was asked before its server began")
        return self._pull
