"""`tidemill chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Any

import click

from tidemill.cli.options import VllmCommand, engine_options
from tidemill.errors import TidemillError

EXAMPLES = """\b
Examples:
  tidemill chat
  tidemill chat --system "Answer in one sentence." --temperature 0
  tidemill chat --url http://127.0.0.1:8000
  echo "Why is the sky blue?" | tidemill chat
"""


def sampling_options(function: Any) -> Any:
    for option in reversed(
        (
            click.option("--temperature", type=float),
            click.option("--top-p", type=float),
            click.option("--top-k", type=int),
            click.option("--max-tokens", type=int, help="Longest answer, in tokens."),
            click.option("--sampling-seed", type=int, help="Same seed, same answer."),
        )
    ):
        function = option(function)
    return function


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "max_tokens")
    return {**{name: options.pop(name) for name in names}, "seed": options.pop("sampling_seed")}


@click.command(cls=VllmCommand, help=f"Talk to MODEL (default: smollm2), or to a server with --url.\n\n{EXAMPLES}")
@click.argument("model", required=False)
@click.option("--url", help="Talk to this OpenAI-compatible server instead of loading a model.")
@click.option("--api-key", help="Key of that server.")
@click.option("--system", help="System message.")
@sampling_options
@engine_options
def command(model: str | None, url: str | None, api_key: str | None, system: str | None, **options: Any) -> None:
    from tidemill.cli.talk import Messages, open_talker

    sampling = take_sampling(options)
    talker = open_talker(model, url, api_key, options, chats=True)
    messages: Messages = [{"role": "system", "content": system}] if system else []
    interactive = sys.stdin.isatty()
    if interactive:
        click.echo(f"{talker.name}: type a message; /reset starts over, /quit ends.")
    while True:
        line = _read(interactive)
        if line is None or line in ("/quit", "/exit"):
            return
        if line == "/reset":
            messages = messages[:1] if system else []
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for piece in talker.chat(messages, sampling):
                answer += piece
                click.echo(piece, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not interactive:
                raise
        except TidemillError as error:
            if not interactive:
                raise
            # A typing person can go on: shorter, or after /reset.
            click.echo(error.report(), err=True)
            messages.pop()
            continue
        click.echo()
        messages.append({"role": "assistant", "content": answer})


def _read(interactive: bool) -> str | None:
    """The next message: a line from a terminal, everything from a pipe."""
    if not interactive:
        return sys.stdin.read().strip() or None
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
