"""What a standby service says over HTTP while it waits for the service before it to end."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

STANDBY_METRIC = "walbrook_standby"
STANDBY_TEXT = "1 while the service waits as a standby."


def standby_application() -> Starlette:
    """The routes of a standby: it is alive and well, and not ready. No database is asked."""
    registry = CollectorRegistry(auto_describe=False)
    Gauge(STANDBY_METRIC, STANDBY_TEXT, registry=registry).set(1)

    def health(_request: Request) -> Response:
        return JSONResponse({"status": "standby"})

    def alive(_request: Request) -> Response:
        return JSONResponse({"status": "alive", "role": "standby"})

    def ready(_request: Request) -> Response:
        reasons = ["it is a standby: another service has the lock of a source"]
        return JSONResponse({"status": "not ready", "role": "standby", "reasons": reasons}, 503)

    def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/healthz", alive),
            Route("/readyz", ready),
            Route("/metrics", metrics),
        ]
    )
