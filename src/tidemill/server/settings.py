"""What the HTTP side can be told, resolved once before the app is built.

Knows no flags: the command line turns `--api-key` and friends into this object.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_MAX_BODY_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Cors:
    """Who may call from a browser; the defaults are vLLM's: anyone, without credentials."""

    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """No `api_keys` means an open server. `version` is what `/version` and `/openapi.json` tell."""

    api_keys: tuple[str, ...] = ()
    root_path: str = ""
    cors: Cors = field(default_factory=Cors)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    disable_docs: bool = False
    log_requests: bool = False
    system_fingerprint: str | None = None
    version: str = ""
