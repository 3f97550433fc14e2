"""How a problem looks over HTTP: OpenAI's error object, for every failure, with the status the problem carries.

The one place that builds the shape. Knows nothing about which route failed.
"""

from __future__ import annotations

import logging
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from tidemill.errors import InvalidRequest, MethodNotAllowed, NotFound, TidemillError

logger = logging.getLogger("tidemill.server")

MAX_LOGGED_CHARS = 200
# Seconds a client is asked to wait: a full queue moves within a step or two, a restart takes longer.
RETRY_AFTER = {429: "1", 503: "5"}


class ErrorDetail(BaseModel):
    model_config = ConfigDict(title="ErrorDetail")

    message: str = Field(description="What is wrong, naming the field, the limit and the way out.")
    type: str
    param: str | None = Field(description="The field at fault, where there is one.")
    code: str | None


class ErrorResponse(BaseModel):
    """OpenAI's error shape."""

    error: ErrorDetail


def error_object(problem: TidemillError) -> dict[str, str | None]:
    message = problem.message
    if problem.cause:
        message = f"{message}; cause: {problem.cause}"
    if problem.fix:
        message = f"{message}; fix: {problem.fix}"
    return {"message": message, "type": problem.type, "param": problem.param, "code": problem.code}


def error_response(problem: TidemillError) -> JSONResponse:
    headers = {}
    if wait := RETRY_AFTER.get(problem.status):
        headers["Retry-After"] = wait
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": error_object(problem)}, status_code=problem.status, headers=headers)


def loggable_path(scope: Scope) -> str:
    """The path as it can stand in a log line: escaped, so that a caller cannot write lines of its own."""
    return quote(scope["path"][:MAX_LOGGED_CHARS])


def internal_error() -> TidemillError:
    """What the outside sees of a bug: nothing of the inside."""
    return TidemillError("the server failed on this request; the server's log has the details")


def install(app: FastAPI) -> None:
    """Gives every exception a route or the framework can raise the same shape."""
    app.add_exception_handler(TidemillError, _on_problem)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_framework_validation)


def _on_problem(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, TidemillError)
    if exc.status >= 500:
        logger.error("%s %s: %s", request.method, loggable_path(request.scope), exc.report())
    return error_response(exc)


def _on_http_exception(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)
    method, path = request.method, request.url.path
    if exc.status_code == 404:
        return error_response(NotFound(f"there is no route {method} {path}", fix="see /docs for the routes"))
    if exc.status_code == 405:
        allowed = _allowed_methods(request) or (exc.headers or {}).get("Allow", "")
        response = error_response(MethodNotAllowed(f"{path} does not take {method}", fix=f"use {allowed}"))
        response.headers["Allow"] = allowed
        return response
    response = error_response(InvalidRequest(str(exc.detail)))
    response.status_code = exc.status_code
    return response


def _allowed_methods(request: Request) -> str:
    """All methods of the route; the framework knows only those of the first handler it met."""
    template = getattr(request.scope.get("route"), "path_format", "")
    described = request.app.openapi()["paths"].get(template, {})
    return ", ".join(sorted(method.upper() for method in described))


def _on_framework_validation(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)
    return error_response(InvalidRequest("; ".join(str(error["msg"]) for error in exc.errors())))
