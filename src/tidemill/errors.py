"""Typed problems: what went wrong, how it looks over HTTP, what caused it and what to type next.

Every failure a user can meet is one of these. The room knows status codes because each problem has exactly one, but it
knows nothing about HTTP frameworks; `as_dict`/`from_dict` carry a problem across the process boundary whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class TidemillError(Exception):
    """A problem with a stable code, an HTTP status, a cause and a fix the user can type."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"
    registry: ClassVar[dict[str, Callable[..., TidemillError]]] = {}

    def __init__(
        self, message: str, *, param: str | None = None, cause: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.cause, self.fix = message, param, cause, fix

    def __init_subclass__(cls) -> None:
        TidemillError.registry[cls.__name__] = cls

    def as_dict(self) -> dict[str, str | None]:
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "param": self.param,
            "cause": self.cause,
            "fix": self.fix,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> TidemillError:
        kind = TidemillError.registry.get(data["kind"], TidemillError)
        return kind(data["message"], param=data.get("param"), cause=data.get("cause"), fix=data.get("fix"))

    def report(self) -> str:
        """The three lines that end every failed start: what failed, the root cause, what to do."""
        lines = [f"error: {self.message}"]
        if self.cause:
            lines.append(f"cause: {self.cause}")
        if self.fix:
            lines.append(f"fix:   {self.fix}")
        return "\n".join(lines)


class InvalidRequest(TidemillError):
    """The request is wrong; the message names the field, the limit and the way out."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A parameter that would be silently ignored elsewhere; here it is refused by name."""

    code = "unsupported_parameter"


class Unauthorized(TidemillError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class ModelNotServed(TidemillError):
    status, type, code = 404, "not_found_error", "model_not_found"


class NotFound(TidemillError):
    status, type, code = 404, "not_found_error", "not_found"


class MethodNotAllowed(TidemillError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooLarge(TidemillError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class QueueFull(TidemillError):
    status, type, code = 429, "rate_limit_error", "queue_full"


class ShuttingDown(TidemillError):
    status, type, code = 503, "service_unavailable_error", "shutting_down"


class EngineDead(TidemillError):
    status, type, code = 503, "service_unavailable_error", "engine_dead"


class EngineStalled(TidemillError):
    status, type, code = 503, "service_unavailable_error", "engine_stalled"


class StartupError(TidemillError):
    """The server or the engine cannot start as asked."""

    code = "startup_failed"


class ConfigError(StartupError):
    code = "invalid_configuration"


class ModelUnavailable(StartupError):
    """The weights cannot be had: missing, gated, offline, or corrupt."""

    code = "model_unavailable"


class UnsupportedModel(StartupError):
    code = "unsupported_model"


class BadCheckpoint(StartupError):
    """A file of the checkpoint is missing, truncated or disagrees with the config; the message names it."""

    code = "bad_checkpoint"


class OutOfMemory(StartupError):
    code = "out_of_memory"
