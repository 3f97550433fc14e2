"""Option kinds shared by commands: vLLM's spellings, which click does not know by itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import click

_SUFFIXES = {**{s: 1000**i for i, s in enumerate("kmgt", 1)}, **{s: 1024**i for i, s in enumerate("KMGT", 1)}}


class HumanInt(click.ParamType):
    """An integer, also as 4k (4,000), 4K (4,096), 2.5M or 8G."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", str(value).strip(), re.ASCII)
        number = Decimal(found[1]) * _SUFFIXES.get(found[2], 1) if found else None
        if number is None or number != int(number):
            self.fail(f"{value!r} is not a whole number such as 4096, 4k, 4K or 2G", param, ctx)
        return int(number)


class VllmCommand(click.Command):
    """Accepts `--flag A B` for options that take several values, and underscores in flag names, as vLLM does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = [option for option in self.params if isinstance(option, click.Option)]
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        several = {name for option in options if option.multiple for name in option.opts}
        spread: list[str] = []
        current, needs_value = None, False
        for index, arg in enumerate(args):
            if arg == "--":
                spread.extend(args[index:])
                break
            if arg.startswith("-"):
                name, equals, value = arg.partition("=")
                if name not in known and name.replace("_", "-") in known:
                    name = name.replace("_", "-")
                current, needs_value = (name, not equals) if name in several else (None, False)
                spread.append(name + equals + value)
            elif current is not None and not needs_value:
                spread.extend((current, arg))
            else:
                spread.append(arg)
                needs_value = False
        return super().parse_args(ctx, spread)


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The settings of an engine, for every command that starts one. Their names are EngineArgs' fields."""
    options = [
        click.option("--revision", help="Branch, tag or commit of a hub model."),
        click.option("--tokenizer", metavar="PATH|ID", help="Take the tokenizer from here instead."),
        click.option("--tokenizer-revision", help="Branch, tag or commit of that tokenizer on the hub."),
        click.option("--chat-template", metavar="PATH|TEXT|NAME", help="Jinja chat template, in place of the model's."),
        click.option("--model-impl", default="auto", show_default=True, help="auto, native or transformers."),
        click.option(
            "--trust-remote-code/--no-trust-remote-code",
            default=False,
            help="Run Python code that comes with the model. Pin it with --revision.",
        ),
        click.option("--check-weights/--no-check-weights", default=False, help="Refuse weights that are NaN or inf."),
        click.option("--load-format", default="auto", show_default=True, help="auto; dummy: random weights, no files."),
        click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, or half on a GPU."),
        click.option("--device", default="auto", show_default=True, help="auto, cuda, cuda:1 or cpu."),
        click.option(
            "--quantization",
            "-q",
            metavar="SCHEME",
            help="Pack weights while loading: int4, int8 or fp8. Those that are quantised stay so; none widens them.",
        ),
        click.option(
            "--kv-cache-dtype", default="auto", show_default=True, help="auto; bf16, fp8 or int8 keep more tokens."
        ),
        click.option("--max-model-len", type=HumanInt(), help="Context length: prompt and answer together."),
        click.option("--max-num-seqs", type=HumanInt(), help="Sequences that run at once."),
        click.option("--max-num-batched-tokens", type=HumanInt(), help="Tokens computed in one step."),
        click.option("--block-size", type=HumanInt(), help="Tokens in a block of the KV cache."),
        click.option("--gpu-memory-utilization", type=float, help="Share of memory to use (on a CPU: of the free)."),
        click.option(
            "--cpu-offload-gb",
            type=float,
            default=0.0,
            show_default=True,
            help="GiB of weights to keep in host memory, streamed to the GPU.",
        ),
        click.option(
            "--enforce-eager/--no-enforce-eager", default=None, help="Do not capture CUDA graphs: slower, less memory."
        ),
        click.option("--kv-cache-memory-bytes", type=HumanInt(), help="Size of the KV cache, such as 2G."),
        click.option("--num-gpu-blocks-override", type=HumanInt(), help="Number of KV blocks, for testing."),
        click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=None, help="On by default."),
        click.option("--enable-chunked-prefill/--no-enable-chunked-prefill", default=None, help="On by default."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of requests that bring none."),
        click.option("--threads", type=int, help="CPU threads; by default the cores this process may use."),
    ]
    for option in reversed(options):
        function = option(function)
    return function
