"""`/openapi.json` and `/docs`: what the server takes and returns, told so exactly that it can be fuzzed.

Bodies are read by `body.py` and not by the framework, so their schemas are added here. The page loads nothing from
other hosts: it works where the server does, without a network.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tidemill.errors import NotFound
from tidemill.server.problems import ErrorResponse
from tidemill.server.schemas_chat import ChatCompletionChunk, ChatCompletionRequest
from tidemill.server.schemas_completion import CompletionChunk, CompletionRequest
from tidemill.server.schemas_service import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from tidemill.server.settings import ServerSettings

REFERENCE = "#/components/schemas/{model}"
NOT_FROM_ROUTES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeTextRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
    ChatCompletionChunk,
    CompletionChunk,
)
MEANINGS = {
    400: "The request is wrong; the message names the field.",
    401: "An API key is needed.",
    404: "There is no such model; the message lists those there are.",
    413: "The body is too large.",
    429: "The queue is full; retry after Retry-After seconds.",
    500: "A bug; the server's log has the details.",
    503: "The engine is not available or the server is stopping.",
}
DESCRIPTION = (
    "OpenAI's API, served by tidemill. A parameter acts or is refused by name: unknown parameters, and known ones "
    "that cannot act, give a 400. `user`, `safety_identifier`, `prompt_cache_key` and `metadata` are labels for the "
    "log."
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tidemill API</title>
<link rel="icon" href="docs/favicon-32x32.png"><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script></body></html>
"""
# Of the package `fastapi-swagger`, which carries Swagger UI 5; older ones cannot read OpenAPI 3.1.
ASSETS = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}
# Relative, so that the page works behind any prefix a proxy adds. Without a validator, which would be another host.
START = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null,
  defaultModelsExpandDepth: 0, defaultModelExpandDepth: 2
});
"""
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"


def body_of(*schemas: type[BaseModel]) -> dict[str, Any]:
    """The `requestBody` of a route that reads its body itself; several schemas are alternatives."""
    references = [{"$ref": REFERENCE.format(model=schema.__name__)} for schema in schemas]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def responses(
    success: type[BaseModel] | None, *statuses: int, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    ok: dict[str, Any] = {"description": "Done."} if success is None else {"model": success, "description": "Done."}
    if streams:
        ok["content"] = {"application/json": {}, "text/event-stream": {}}
        ok["description"] = "The answer, or with `stream` its chunks (see the Chunk schemas) as server-sent events."
    described: dict[int | str, dict[str, Any]] = {200: ok}
    for status in statuses:
        described[status] = {"model": ErrorResponse, "description": MEANINGS[status]}
    return described


def install(app: FastAPI, settings: ServerSettings) -> None:
    """Gives the app its description, and the page that shows it."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, settings)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
    if settings.disable_docs:
        return

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(PAGE, media_type="text/html", headers={"Content-Security-Policy": POLICY})

    @app.get("/docs/start.js", include_in_schema=False)
    async def start() -> Response:
        return Response(START, media_type="text/javascript")

    @app.get("/docs/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise NotFound(f"the documentation has no file {name!r}")
        content = (files("fastapi_swagger") / "resources" / name).read_bytes()
        return Response(content, media_type=ASSETS[name], headers={"Cache-Control": "max-age=3600"})


def _describe(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    described = get_openapi(
        title="tidemill", version=settings.version, description=DESCRIPTION, routes=app.routes, servers=app.servers
    )
    schemas = described["components"]["schemas"]
    _, definitions = models_json_schema([(model, "validation") for model in NOT_FROM_ROUTES], ref_template=REFERENCE)
    schemas.update(definitions["$defs"])
    # The framework announces its own validation error for every route with a parameter; ours are all 400s.
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for path in described["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if settings.api_keys and "401" in operation["responses"]:
                operation["security"] = [{"key": []}]
    if settings.api_keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return described
