"""What operators and clients ask about the server itself: probes, version, load, metrics, models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from tidemill.server.openapi import responses
from tidemill.server.schemas_service import Load, ModelCard, ModelList, Root, Version
from tidemill.server.state import AppState

if TYPE_CHECKING:
    from tidemill.engine.host import ServedModel


def service_routes(state: AppState) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get("/", summary="Where to go from here", responses=responses(Root))
    async def root() -> Root:
        docs = None if state.settings.disable_docs else "/docs"
        return Root(name="tidemill", version=state.settings.version, docs=docs, models="/v1/models")

    async def health() -> Response:
        state.check_health()
        return Response(status_code=200)

    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        router.add_api_route(
            path,
            health,
            methods=[method],
            summary="200 if every engine is well",
            response_class=Response,
            responses=responses(None, 503),
        )

    for path in ("/health", "/ping"):
        router.add_api_route(path, health, methods=["HEAD"], response_class=Response, include_in_schema=False)

    @router.head("/version", include_in_schema=False)
    @router.get("/version", summary="The version of tidemill", responses=responses(Version))
    async def version() -> Version:
        return Version(version=state.settings.version)

    @router.get("/load", summary="How many requests are in flight", responses=responses(Load, 401))
    async def load() -> Load:
        return Load(server_load=sum(client.num_in_flight for client in state.clients))

    @router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models", summary="The served models", responses=responses(ModelList, 401))
    async def list_models() -> ModelList:
        return ModelList(data=[_card(model, name) for model in state.host.models for name in model.names])

    @router.get("/v1/models/{model_id:path}", summary="One served model", responses=responses(ModelCard, 401, 404))
    async def get_model(model_id: str) -> ModelCard:
        return _card(state.host.find(model_id), model_id)

    return router


def _card(model: ServedModel, name: str) -> ModelCard:
    return ModelCard(id=name, created=model.created, root=model.root, max_model_len=model.max_model_len)
