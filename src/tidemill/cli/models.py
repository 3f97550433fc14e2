"""`tidemill models`: what can be served by name, what is on this machine, and how to fetch or remove it."""

from __future__ import annotations

import json

import click

from tidemill.progress import ProgressReporter

EXAMPLES = """\b
Examples:
  tidemill models list
  tidemill models pull smollm2
  tidemill models path smollm2
  tidemill models support ./model-folder
  tidemill models rm smollm2
"""


def _help(text: str, example: str) -> str:
    return f"{text}\n\n\b\nExamples:\n  tidemill models {example}\n"


@click.group(help=f"List, fetch, locate and remove models.\n\n{EXAMPLES}")
def command() -> None:
    pass


@command.command("list", help=_help("Aliases, and what is cached on this machine.", "list"))
def list_models() -> None:
    from rich.console import Console
    from rich.table import Table

    from tidemill.weights.aliases import ALIASES
    from tidemill.weights.cache import list_cached

    cached = {model.name: model for model in list_cached()}
    table = Table("name", "source", "size", "on this machine")
    for name, alias in ALIASES.items():
        here = cached.pop(name, None)
        size = f"{here.nbytes / 1e6:.0f} MB" if here else f"{alias.wheel_bytes / 1e6:.0f} MB to fetch"
        table.add_row(name, f"pypi {alias.package}=={alias.version}", size, "yes" if here else "no")
    for model in cached.values():
        table.add_row(model.name, model.source, f"{model.nbytes / 1e6:.0f} MB", "yes")
    Console().print(table)


@command.command(help=_help("Fetch NAME (an alias or a hub id) and print where it is.", "pull smollm2"))
@click.argument("name")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
def pull(name: str, revision: str | None) -> None:
    _fetch(name, revision)


@command.command(help=_help("Print where NAME is on this machine, fetching it if need be.", "path smollm2"))
@click.argument("name")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
def path(name: str, revision: str | None) -> None:
    _fetch(name, revision)


@command.command(help=_help("Say from its config alone how MODEL would run here, or why not.", "support org/name"))
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--trust-remote-code", is_flag=True, help="Also look at models that bring their own Python code.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def support(models: tuple[str, ...], revision: str | None, trust_remote_code: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from tidemill.engine.support import support as look

    with ProgressReporter() as progress:
        rows = [
            look(model, revision=revision, trust_remote_code=trust_remote_code, on_progress=progress)
            for model in models
        ]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
    for row in () if as_json else rows:
        lines = [("architecture", row.architecture), ("runs", row.runs), ("", row.note), ("fix", row.fix)]
        if row.runs != "no":
            cache = f"{row.cache_bytes_per_token / 1024:,.1f} KiB a token in 16 bits; {row.cache_note}"
            lines += [("context", f"{row.context:,} tokens"), ("KV cache", f"{row.layers} layers, {cache}")]
        click.echo(row.model)
        click.echo("\n".join(f"  {name:<14}{value}" for name, value in lines if value))
    if any(row.runs == "no" for row in rows):
        raise SystemExit(1)


def _fetch(name: str, revision: str | None) -> None:
    from tidemill.weights.location import locate

    with ProgressReporter() as progress:
        files = locate(name, revision=revision, on_progress=progress)
    click.echo(files.path)


@command.command(help=_help("Remove NAME from this machine's cache.", "rm smollm2"))
@click.argument("name")
def rm(name: str) -> None:
    from tidemill.weights.cache import remove_cached

    for model in remove_cached(name):
        click.echo(f"removed {model.name}, {model.nbytes / 1e6:.0f} MB")
