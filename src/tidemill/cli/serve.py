"""`tidemill serve`: one model behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from tidemill import __version__
from tidemill.cli.options import HumanInt, VllmCommand, engine_options

if TYPE_CHECKING:
    from tidemill.config import EngineArgs
    from tidemill.engine.client import EngineClient
    from tidemill.engine.messages import Ready
    from tidemill.engine.prepare import Prepared

EXAMPLES = """\b
Examples:
  tidemill serve
  tidemill serve ./model-folder --served-model-name mine ours
  tidemill serve model.gguf --max-model-len 4k --host 0.0.0.0 --api-key "$KEY"
  tidemill serve org/name --revision main --dtype float32
"""


@click.command(cls=VllmCommand, help=f"Serve MODEL (default: smollm2) over HTTP.\n\n{EXAMPLES}")
@click.argument("model", required=False)
@click.option("--model", "model_flag", metavar="MODEL", help="The same as the argument.")
@click.option("--served-model-name", multiple=True, metavar="NAME...", help="Names it answers to.")
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 to be reachable from outside.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--uds", metavar="PATH", help="Listen on a Unix socket instead.")
@click.option("--api-key", multiple=True, metavar="KEY...", help="Or TIDEMILL_API_KEY / VLLM_API_KEY.")
@click.option("--allowed-origins", default='["*"]', show_default=True, metavar="JSON", help="CORS.")
@click.option("--allowed-methods", default='["*"]', show_default=True, metavar="JSON")
@click.option("--allowed-headers", default='["*"]', show_default=True, metavar="JSON")
@click.option("--allow-credentials", is_flag=True)
@click.option("--ssl-keyfile", metavar="PATH")
@click.option("--ssl-certfile", metavar="PATH")
@click.option("--ssl-ca-certs", metavar="PATH")
@click.option(
    "--ssl-cert-reqs",
    type=click.IntRange(0, 2),
    default=0,
    help="ssl.CERT_NONE (0), CERT_OPTIONAL (1), CERT_REQUIRED (2).",
)
@click.option("--enable-ssl-refresh", is_flag=True, help="Reload certificates when their files change.")
@click.option("--root-path", default="", help="Path prefix behind a proxy.")
@click.option(
    "--uvicorn-log-level",
    type=click.Choice(["critical", "error", "warning", "info", "debug", "trace"]),
    default="warning",
    show_default=True,
)
@click.option("--enable-log-requests", is_flag=True, help="Log each request: id, route, tokens, labels.")
@click.option("--disable-fastapi-docs", is_flag=True, help="No /docs and no /openapi.json.")
@click.option("--max-body-bytes", type=HumanInt(), default="32M", show_default=True, help="Larger bodies get 413.")
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds to finish on SIGTERM.",
)
@click.option(
    "--engine-stall-timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="Seconds until /health is 503.",
)
@click.option("--tensor-parallel-size", "-tp", type=int, default=1, show_default=True, help="Only 1 in this version.")
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    default="fcfs",
    show_default=True,
    help="priority: a request's priority counts, lower first.",
)
@click.option("--max-waiting", type=HumanInt(), help="Sequences that may wait; more are answered 429.")
@engine_options
def command(model: str | None, model_flag: str | None, **options: Any) -> None:
    from tidemill.config import log_level
    from tidemill.errors import ConfigError

    if model and model_flag and model != model_flag:
        raise ConfigError(
            f"two models are named, {model} and {model_flag}; this version serves one",
            param="model",
            fix="name one, and start a second server on another --port for the other",
        )
    if options.pop("tensor_parallel_size") != 1:
        raise ConfigError(
            "tensor_parallel_size must be 1 in this version", param="tensor_parallel_size", fix="leave it out"
        )
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s: %(message)s")
    if options["enable_log_requests"]:
        logging.getLogger("tidemill").setLevel(logging.INFO)
    # A collection pause in the middle of streaming is worse than a little more memory.
    import gc

    gc.set_threshold(10_000, 50, 50)
    runner = _make_runner()
    sys.exit(runner(_serve(model or model_flag or "smollm2", options)))


def _make_runner() -> Any:
    try:
        import uvloop

        return uvloop.run
    except ImportError:
        return asyncio.run


async def _serve(model: str, options: dict[str, Any]) -> int:
    from tidemill.cli.report import startup_report
    from tidemill.config import EngineArgs
    from tidemill.engine.host import Host, ServedModel
    from tidemill.server.app import create_app
    from tidemill.server.run import Listen, bind, release, serve

    listen = Listen(
        access_log=options["enable_log_requests"],
        log_level=options["uvicorn_log_level"],
        **{name: options[name] for name in Listen.__dataclass_fields__ if name in options},
    )
    keys, key_variable = _api_keys(options["api_key"])
    settings = _settings(options, keys)
    args = EngineArgs(model=model, **{k: v for k, v in options.items() if k in EngineArgs.__dataclass_fields__})
    bound = bind(listen)
    try:
        prepared, client, ready = await _start(args, options["engine_stall_timeout"], lambda: release(listen))
        served = ServedModel(
            names=options["served_model_name"] or (model,),
            root=prepared.config.model_path,
            created=int(time.time()),
            max_model_len=prepared.config.max_model_len,
            tokenizer=prepared.tokenizer,
            chat_template=prepared.chat_template,
            client=client,
            default_sampling=prepared.default_sampling,
        )
        app = create_app(Host([served]), settings)
        report = startup_report(prepared, served.names, ready, listen.url(bound), key_variable=key_variable)
        problem = await serve(app, bound, listen, lambda: _show(report))
    finally:
        release(listen)
    if problem is not None:
        print(f"\n{problem.report()}", file=sys.stderr, flush=True)
        return 1
    return 0


async def _start(
    args: EngineArgs, stall_timeout: float, clean_up: Callable[[], None]
) -> tuple[Prepared, EngineClient, Ready]:
    """Everything slow, with its progress shown. A signal ends it at once."""
    from tidemill.engine.client import EngineClient
    from tidemill.engine.prepare import prepare
    from tidemill.progress import ProgressReporter

    with ProgressReporter() as progress:

        def leave(number: int) -> None:
            progress.close()
            clean_up()
            print("\nstopped before the model was ready", file=sys.stderr, flush=True)
            # Not sys.exit: it would wait for the thread that downloads. The engine ends with its end of the socket.
            os._exit(128 + number)

        # Until requests are served there is nothing to drain. A container's first process has no default handlers.
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, leave, int(name))
        prepared = await asyncio.to_thread(prepare, args, progress)
        client = EngineClient(prepared.config, prepared.tokenizer, stall_timeout=stall_timeout, on_progress=progress)
        return prepared, client, await client.start()


def _show(report: str) -> None:
    # A full disk or a closed pipe behind stdout is no reason not to serve.
    with suppress(OSError):
        print(report, flush=True)


def _api_keys(given: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """The keys, and the variable a user finds one in."""
    from tidemill.errors import ConfigError

    if any(not key.strip() for key in given):
        raise ConfigError(
            "--api-key is empty, which would let everybody in",
            param="api_key",
            cause="the variable it was taken from may not be set",
            fix='--api-key "$(openssl rand -hex 16)", or leave it out for an open server',
        )
    variables = [name for name in ("TIDEMILL_API_KEY", "VLLM_API_KEY") if os.environ.get(name)]
    if given:
        return given, variables[0] if variables and os.environ[variables[0]] in given else "TIDEMILL_API_KEY"
    return tuple(os.environ[name] for name in variables), variables[0] if variables else None


def _settings(options: dict[str, Any], keys: tuple[str, ...]) -> Any:
    from tidemill.server.settings import Cors, ServerSettings

    return ServerSettings(
        api_keys=keys,
        root_path=options["root_path"],
        cors=Cors(
            _json_list(options, "allowed_origins"),
            _json_list(options, "allowed_methods"),
            _json_list(options, "allowed_headers"),
            options["allow_credentials"],
        ),
        max_body_bytes=options["max_body_bytes"],
        disable_docs=options["disable_fastapi_docs"],
        log_requests=options["enable_log_requests"],
        version=__version__,
    )


def _json_list(options: dict[str, Any], name: str) -> tuple[str, ...]:
    from tidemill.errors import ConfigError

    try:
        value = json.loads(options[name])
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} takes a JSON list of strings", param=name, fix=f"{flag} '[\"https://example.org\"]'")
    return tuple(value)
