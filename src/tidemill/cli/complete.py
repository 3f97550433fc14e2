"""`tidemill complete`: continue a text."""

from __future__ import annotations

import sys
from typing import Any

import click

from tidemill.cli.chat import sampling_options, take_sampling
from tidemill.cli.options import VllmCommand, engine_options

EXAMPLES = """\b
Examples:
  tidemill complete "Once upon a time" --max-tokens 64
  tidemill complete - --model ./model.gguf < prompt.txt
  tidemill complete "def fib(n):" --url http://127.0.0.1:8000 --temperature 0
"""


@click.command(cls=VllmCommand, help=f"Continue PROMPT; - reads it from standard input.\n\n{EXAMPLES}")
@click.argument("prompt")
@click.option("--model", help="Model to load, or to ask for at --url.  [default: smollm2]")
@click.option("--url", help="Use this OpenAI-compatible server instead of loading a model.")
@click.option("--api-key", help="Key of that server.")
@sampling_options
@engine_options
def command(prompt: str, model: str | None, url: str | None, api_key: str | None, **options: Any) -> None:
    from tidemill.cli.talk import open_talker

    sampling = take_sampling(options)
    if sampling["max_tokens"] is None:
        sampling["max_tokens"] = 128
    talker = open_talker(model, url, api_key, options, chats=False)
    for piece in talker.complete(sys.stdin.read() if prompt == "-" else prompt, sampling):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
