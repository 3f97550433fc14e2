"""`tidemill quantize`, without the terminal: walks through a model once and writes it quantised.

In memory at any time: one layer, dense and quantised, and one vector per token of the texts (three streams of them:
calibration, and evaluation through the dense and the quantised model). What is outside of the layers is there only at
the beginning and at the end. Finished layers are not done again after an interruption: they are read back, so that
the layers behind them see the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import ConfigError
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.rope import Rope
from tidemill.quantise.calibration import Texts, read_texts
from tidemill.quantise.compressed import quantization_config
from tidemill.quantise.folder import OutFolder
from tidemill.quantise.grid import Grid
from tidemill.quantise.layer_step import Recipe, quantise_layer, refill, rounding_of_inputs
from tidemill.quantise.neighbours import copy_neighbours, make_neighbours
from tidemill.quantise.perplexity import mean_perplexity
from tidemill.quantise.settings import GROUP_SIZES, WHOLE_ROW, Wishes
from tidemill.quantise.sites import watch
from tidemill.quantise.source import Source, chosen, open_source
from tidemill.quantise.stream import Stream
from tidemill.runtime.loader import check_tensors, refuse_not_finite
from tidemill.text.tokenizer import Tokenizer, load_tokenizer
from tidemill.weights.location import ModelFiles

VERSION = 1
"""Changes whenever the same wishes would give other numbers, so that no folder mixes them."""

OnLayer = Callable[[int, int, float, float], None]
"""(layers done, layers in all, seconds of this one, seconds left)"""


@dataclass(frozen=True)
class Report:
    out: Path
    method: str
    group_size: int | None
    matrices: int
    nbytes: int
    bits: float
    """Per weight of the quantised matrices, scales included."""
    before: float | None
    after: float | None
    evaluated_on: str
    calibrated_on: str
    resumed: int
    """Layers that an earlier run had finished."""
    notes: tuple[str, ...]


@torch.no_grad()
def quantise(
    files: ModelFiles,
    out: Path,
    wishes: Wishes,
    *,
    force: bool = False,
    device: str = "cpu",
    on_layer: OnLayer | None = None,
) -> Report:
    wishes.check()
    source = open_source(files)
    _refuse_same_place(files, out)
    check_tensors(list(source.parameters()), source.checkpoint)
    wanted = chosen(source.matrices(), wishes.ignore, source.spec.head)
    recipe = _recipe(wishes, source, wanted)
    # A folder's tokenizer is copied whether it can be read or not; a GGUF's is made.
    needs_tokenizer = files.kind == "gguf" or wishes.calibration or wishes.evaluation
    tokenizer = load_tokenizer(files) if needs_tokenizer else None
    texts = _texts(wishes, source, tokenizer)
    folder = OutFolder(out, len(source.spec.layers) + 1, _made_of(wishes, source, recipe, texts), force)
    folder.check_space(_nbytes(source, recipe, wanted))
    walk = _Walk(source, recipe, texts, folder, Placement(torch.float32, _device(device)))
    before, after = walk.run(on_layer)
    if tokenizer is not None and files.kind == "gguf":
        make_neighbours(source.checkpoint, tokenizer, out)
    else:
        copy_neighbours(files.path, out)
    ignore = [*source.others(), *(prefix for prefix in source.matrices() if prefix not in wanted)]
    settings = quantization_config(recipe.target, recipe.grid, ignore)
    config = {**source.config, "quantization_config": settings}
    samples = len(texts.calibration)
    return Report(
        out=out,
        method=recipe.method,
        group_size=recipe.grid.group_size,
        matrices=len(wanted),
        nbytes=folder.finish(config),
        bits=_bits(recipe, wanted),
        before=before,
        after=after,
        evaluated_on=texts.evaluated_on,
        calibrated_on=f"{samples} samples of {len(texts.calibration[0])} tokens" if samples else "",
        resumed=walk.resumed,
        notes=source.notes,
    )


class _Walk:
    def __init__(self, source: Source, recipe: Recipe, texts: Texts, folder: OutFolder, place: Placement) -> None:
        self.source, self.recipe, self.folder, self.place = source, recipe, folder, place
        self.longest = max((len(ids) for ids in (*texts.calibration, *texts.evaluation)), default=1)
        self.evaluated = bool(texts.evaluation)
        self.resumed = 0
        spec = source.spec
        self.calibration = Stream(spec, texts.calibration if recipe.looks_at_inputs else [], place)
        self.dense, self.quantised = (Stream(spec, texts.evaluation, place) for _ in range(2))

    def run(self, on_layer: OnLayer | None) -> tuple[float | None, float | None]:
        """Perplexities of the dense and of the quantised model."""
        ropes = self._embed()
        layers, spent, worked = len(self.source.spec.layers), 0.0, 0
        for index in range(layers):
            began, finished = time.monotonic(), self.folder.find(index) is not None
            self._layer(index, ropes, finished)
            seconds = time.monotonic() - began
            if finished:
                self.resumed += 1
            else:
                spent, worked = spent + seconds, worked + 1
            if on_layer is not None:
                on_layer(index + 1, layers, seconds, (layers - index - 1) * spent / max(worked, 1))
        return self._leave()

    def _embed(self) -> list[Rope]:
        outside = self.source.outside(self.longest, self.place)
        parameters = list(outside.parameters())
        self._fill(parameters)
        self.dense.embed(outside)
        kept = {parameter.name: self.source.kept(parameter.name) for parameter in parameters}
        for parameter in parameters:
            parameter.fill(kept[parameter.name])
        self.quantised.embed(outside)
        self.calibration.embed(outside)
        last = len(self.source.spec.layers)
        if self.folder.find(last) is None:
            self.folder.save(last, kept)
        return outside.ropes

    def _layer(self, index: int, ropes: list[Rope], finished: bool) -> None:
        if finished and not self.evaluated and not self.recipe.looks_at_inputs:
            return
        layer = self.source.layer(index, self.place)
        sites = watch(layer, self.source.dtype_of)
        parameters = list(layer.parameters())
        if not finished or self.evaluated:
            self._fill(parameters)
        self.dense.through(layer, index, ropes)
        if finished:
            tensors = self.folder.load(index)
        else:
            for linear in sites.linears:
                linear.watching = self.recipe.looks_at_inputs
            self.calibration.show(layer, index, ropes)
            for linear in sites.linears:
                linear.watching = False
            tensors = quantise_layer(layer, sites, self.source, self.recipe)
            self.folder.save(index, tensors)
        refill(parameters, tensors, self.recipe)
        for linear in sites.linears:
            if not self.recipe.chosen.isdisjoint(linear.parts):
                linear.round_inputs = rounding_of_inputs(self.recipe.target)
        self.quantised.through(layer, index, ropes)
        self.calibration.through(layer, index, ropes)

    def _leave(self) -> tuple[float | None, float | None]:
        if not self.evaluated:
            return None, None
        outside = self.source.outside(self.longest, self.place)
        parameters = list(outside.parameters())
        self._fill(parameters)
        before = mean_perplexity(self.dense.token_losses(outside))
        for parameter in parameters:
            parameter.fill(self.source.kept(parameter.name))
        return before, mean_perplexity(self.quantised.token_losses(outside))

    def _fill(self, parameters: list[Parameter]) -> None:
        for parameter in parameters:
            parameter.fill(self.source.checkpoint.read(parameter.name))
            refuse_not_finite(parameter, self.source.checkpoint)


def _texts(wishes: Wishes, source: Source, tokenizer: Tokenizer | None) -> Texts:
    if tokenizer is None:
        return Texts([], [], "")
    length = min(wishes.length, source.spec.max_position)
    return read_texts(tokenizer, wishes.calibration, wishes.evaluation, wishes.samples, length)


def _recipe(wishes: Wishes, source: Source, wanted: dict[str, tuple[int, int]]) -> Recipe:
    target, size = wishes.target, wishes.group_size
    fitting = [size for size in GROUP_SIZES if all(inputs % size == 0 for _, inputs in wanted.values())]
    if size is None and target.by_group:
        size = fitting[0] if fitting else WHOLE_ROW
    if size is not None and size != WHOLE_ROW:
        _refuse_group(size, wanted, fitting)
    group_size = None if size in (None, WHOLE_ROW) else size
    grid = Grid(target.kind, target.bits, group_size, source.dtype, wishes.asymmetric)
    return Recipe(target, grid, wishes.chosen_method, frozenset(wanted))


def _refuse_group(size: int, wanted: dict[str, tuple[int, int]], fitting: list[int]) -> None:
    odd = [prefix for prefix, (_, inputs) in wanted.items() if inputs % size]
    if not odd:
        return
    ends = " ".join(sorted({prefix.rsplit(".", 1)[-1] for prefix in odd}))
    fits = f"--group-size {fitting[0]}" if fitting else f"--group-size {WHOLE_ROW} (one scale per row)"
    raise ConfigError(
        f"groups of {size} do not divide {odd[0]}, which has {wanted[odd[0]][1]} inputs",
        param="group_size",
        cause=f"so it is with {len(odd):,} of {len(wanted):,} matrices",
        fix=f"{fits}, or leave them dense: --ignore {ends}",
    )


def _refuse_same_place(files: ModelFiles, out: Path) -> None:
    folder = files.path if files.kind == "folder" else files.path.parent
    if out.resolve() == folder.resolve():
        raise ConfigError(
            f"{out} is where the model itself is",
            param="out",
            cause="it would be written over while it is read",
            fix="name another folder",
        )


def _device(name: str) -> torch.device:
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or (found.type == "cuda" and not torch.cuda.is_available()) or found.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"--device {name} is not there",
            param="device",
            cause="there is no such device, or torch does not see it",
            fix="--device cpu",
        )
    return found


def _made_of(wishes: Wishes, source: Source, recipe: Recipe, texts: Texts) -> dict[str, Any]:
    files, path = source.files, source.files.path
    stored = sorted({info.file for info in source.checkpoint.tensors.values()})
    paths = [path] if files.kind == "gguf" else [path / name for name in stored]
    sizes = [[found.name, found.stat().st_size, found.stat().st_mtime_ns] for found in paths]
    samples = json.dumps(texts.calibration) if recipe.looks_at_inputs else ""
    return {
        "version": VERSION,
        "model": str(path.resolve()),
        "config": hashlib.sha256(json.dumps(source.config, sort_keys=True).encode()).hexdigest(),
        "files": sizes,
        "scheme": wishes.scheme,
        "group size": recipe.grid.group_size,
        "asymmetric": wishes.asymmetric,
        "method": recipe.method,
        "ignore": sorted(wishes.ignore),
        "calibration": hashlib.sha256(samples.encode()).hexdigest(),
    }


def _bits(recipe: Recipe, wanted: dict[str, tuple[int, int]]) -> float:
    numbers = sum(outputs * inputs for outputs, inputs in wanted.values())
    scales = sum(outputs * recipe.grid.groups(inputs) for outputs, inputs in wanted.values())
    each = 8 * recipe.grid.scale_dtype.itemsize + (recipe.target.bits if recipe.grid.asymmetric else 0)
    return recipe.target.bits + each * scales / numbers


def _nbytes(source: Source, recipe: Recipe, wanted: dict[str, tuple[int, int]]) -> int:
    packed = sum(outputs * inputs for outputs, inputs in wanted.values()) * _bits(recipe, wanted) / 8
    dense = sum(
        parameter.target.numel() * source.dtype_of(parameter.name).itemsize
        for parameter in source.parameters()
        if parameter.name.removesuffix(".weight") not in wanted
    )
    return int(packed) + dense
