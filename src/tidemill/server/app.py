"""The ASGI app: routes, and around them everything that holds for every request.

Knows how the pieces fit; the runner that owns sockets and signals is not here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from tidemill.server import openapi, problems
from tidemill.server.body import ClientGone
from tidemill.server.envelope import BodyLimit, Envelope, KeyCheck
from tidemill.server.metrics import Metrics
from tidemill.server.routes_generate import generation_routes
from tidemill.server.routes_service import service_routes
from tidemill.server.routes_text import text_routes
from tidemill.server.settings import ServerSettings
from tidemill.server.state import AppState

if TYPE_CHECKING:
    from tidemill.engine.host import Host


def create_app(host: Host, settings: ServerSettings) -> FastAPI:
    """A complete app. `app.state.server` is its AppState; set `draining` there to refuse new requests."""
    if not settings.version:
        settings = replace(settings, version=_installed_version())
    state = AppState(host, settings, Metrics(host))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        state.threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None if settings.disable_docs else "/openapi.json",
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.server = state
    for routes in (service_routes, generation_routes, text_routes):
        app.include_router(routes(state))
    openapi.install(app, settings)
    problems.install(app)
    app.add_exception_handler(ClientGone, _nobody_reads)
    _wrap(app, state)
    return app


def _wrap(app: FastAPI, state: AppState) -> None:
    """Each layer added is outside of the ones before: id, then CORS (preflights carry no key), key, body size."""
    settings = state.settings
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(KeyCheck, keys=settings.api_keys)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors.allowed_origins,
        allow_methods=settings.cors.allowed_methods,
        allow_headers=settings.cors.allowed_headers,
        allow_credentials=settings.cors.allow_credentials,
        expose_headers=["X-Request-Id"],
    )
    app.add_middleware(Envelope, state=state)


def _nobody_reads(request: Request, exc: Exception) -> Response:
    return Response(status_code=499)


def _installed_version() -> str:
    try:
        return version("tidemill")
    except PackageNotFoundError:
        return "0"
