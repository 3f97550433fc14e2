"""`tidemill quantize`: a model rounded to fewer bits, as a folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidemill.cli.options import HumanInt, VllmCommand
from tidemill.progress import ProgressReporter

if TYPE_CHECKING:
    from tidemill.quantise.run import Report

EXAMPLES = """\b
Examples:
  tidemill quantize smollm2 ./smollm2-w4 --scheme w4a16 --calibration wiki.txt
  tidemill quantize ./my-model ./my-model-int8 --scheme w8a8
  tidemill quantize org/name ./out --scheme w4a16 --group-size 32 --method awq --calibration texts.jsonl
"""
HELP = f"""Quantise MODEL and write it to the folder OUT, as compressed-tensors that transformers reads too.

Layer by layer: memory holds one layer at a time. An interrupted run goes on where it stopped when it is repeated.

{EXAMPLES}"""


@click.command(cls=VllmCommand, help=HELP)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--scheme", required=True, help="w4a16, w8a16, w8a8 or fp8: bits of weights and of activations.")
@click.option("--group-size", type=int, help="Weights that share a scale; -1: a whole row. By default what fits.")
@click.option("--asymmetric", is_flag=True, help="A zero point per group too: less error, a little larger.")
@click.option("--method", help="rtn, gptq or awq; gptq by default where there is a calibration file, else rtn.")
@click.option("--calibration", metavar="FILE", help='Text to calibrate on: plain, or .jsonl with a "text" each.')
@click.option("--eval", "evaluation", metavar="FILE", help="Text to measure on, in place of the calibration's end.")
@click.option("--ignore", multiple=True, metavar="NAME...", help="Matrices to leave dense: down_proj, re:PATTERN.")
@click.option("--samples", type=HumanInt(), default=128, show_default=True, help="Samples to calibrate on.")
@click.option("--length", type=HumanInt(), default=512, show_default=True, help="Tokens of a sample.")
@click.option("--device", default="cpu", show_default=True, help="Where to compute: cpu, cuda or cuda:1.")
@click.option("--force", is_flag=True, help="Write over the model in OUT, or start an unfinished one over.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
def command(
    model: str,
    out: Path,
    scheme: str,
    group_size: int | None,
    asymmetric: bool,
    method: str | None,
    calibration: str | None,
    evaluation: str | None,
    ignore: tuple[str, ...],
    samples: int,
    length: int,
    device: str,
    force: bool,
    revision: str | None,
) -> None:
    from tidemill.quantise.settings import Wishes

    wishes = Wishes(scheme, group_size, method, calibration, evaluation, ignore, samples, length, asymmetric)
    wishes.check()

    from tidemill.weights.location import locate

    with ProgressReporter() as progress:
        files = locate(model, revision=revision, on_progress=progress)

    from tidemill.quantise.run import quantise

    began = time.monotonic()
    try:
        report = quantise(files, out, wishes, force=force, device=device, on_layer=_tell)
    except KeyboardInterrupt:
        click.echo(f"interrupted: the same command goes on where it stopped, from {out / '.partial'}", err=True)
        raise
    click.echo(_summary(report, wishes.scheme, time.monotonic() - began))


def _tell(done: int, total: int, seconds: float, left: float) -> None:
    later = f", {_minutes(left)} left" if done < total else ""
    click.echo(f"layer {done} of {total}: {seconds:.1f} s{later}", err=True)
    sys.stderr.flush()


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _summary(report: Report, scheme: str, seconds: float) -> str:
    groups = "whole rows" if report.group_size is None else f"groups of {report.group_size}"
    rows = [
        ("wrote", f"{report.out}, {report.nbytes / 1e6:,.1f} MB"),
        ("scheme", f"{scheme}, {groups}, {report.bits:.2f} bits a weight in {report.matrices:,} matrices"),
        ("method", f"{report.method}{f', {report.calibrated_on}' if report.calibrated_on else ''}"),
    ]
    if report.before is None or report.after is None:
        rows.append(("perplexity", "not measured: give --eval FILE or --calibration FILE"))
    else:
        change = 100 * (report.after / report.before - 1)
        rows.append(("perplexity", f"{report.before:.4f} before, {report.after:.4f} after ({change:+.2f}%)"))
        rows.append(("", f"on {report.evaluated_on}"))
    resumed = f", {report.resumed} layers were there already" if report.resumed else ""
    rows.append(("took", f"{_minutes(seconds)}{resumed}"))
    rows += [("note", note) for note in report.notes]
    return "\n".join(f"  {name:<12}{value}" for name, value in rows)
