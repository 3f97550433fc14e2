"""What would happen to a checkpoint here, told from its config alone: native, through transformers, or why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import TidemillError, UnsupportedModel
from tidemill.models.choice import choose
from tidemill.models.registry import NATIVE, architectures_of, native_text
from tidemill.weights.gguf_checkpoint import GgufCheckpoint
from tidemill.weights.hub import fetch_without_weights
from tidemill.weights.json_file import read_json
from tidemill.weights.location import ModelFiles, is_hub_id, locate
from tidemill.weights.quantised import FORMATS, quantisation_of


@dataclass(frozen=True)
class Support:
    model: str
    architecture: str
    runs: str
    """native, transformers, or no."""
    note: str
    """Family and known relatives, or the reason why not."""
    fix: str = ""
    context: int = 0
    layers: int = 0
    cache_bytes_per_token: int = 0
    """In two-byte numbers, before windows are counted."""
    cache_note: str = ""


def support(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Support:
    """Never raises for what is wrong with one model: the reason is the answer."""
    try:
        return _look(model, revision, trust_remote_code, on_progress)
    except TidemillError as problem:
        reason = f"{problem.message}: {problem.cause}" if problem.cause else problem.message
        return Support(model, "", "no", reason, problem.fix or "")


def _look(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    on_progress: Callable[[str, int, int], None] | None,
) -> Support:
    files = _config_files(model, revision, on_progress)
    raw = _config(files)
    _refuse_unread(raw, model)
    choice = choose(raw, files.path, files.kind, trust_remote_code=trust_remote_code, on_progress=on_progress)
    shape, layout = choice.shape, choice.shape.layout
    return Support(
        model=model,
        architecture=architectures_of(raw)[0],
        runs=choice.impl,
        note=_family_note(raw) if choice.impl == "native" else choice.why,
        context=shape.max_position,
        layers=len(shape.caches),
        cache_bytes_per_token=2 * sum(cache.numbers for cache in shape.caches),
        cache_note=_cache_note([cache.window for cache in shape.caches], any(c.uncompressed for c in layout.shapes)),
    )


def _refuse_unread(raw: Mapping[str, Any], model: str) -> None:
    settings = quantisation_of(raw)
    if settings is not None and str(settings.get("quant_method", "")).lower() not in FORMATS:
        raise UnsupportedModel(
            f"{model} is quantised as {settings.get('quant_method')}, which is not read",
            cause=f"its quantization_config says so; read are {', '.join(FORMATS)}, and GGUF files",
            fix="serve the unquantised checkpoint, or a .gguf of the model",
        )


def _family_note(raw: Mapping[str, Any]) -> str:
    text = native_text(raw)
    assert text is not None, "only native models have a family"
    native = NATIVE[text.architecture]
    return f"models/{native.file}.py: {native.examples}"


def _cache_note(windows: list[int | None], compressed: bool) -> str:
    local = [window for window in windows if window is not None]
    if compressed:
        return "compressed keys and values"
    if local:
        return f"{len(local)} of {len(windows)} layers keep the last {max(local):,} tokens"
    return "every layer keeps every token"


def _config_files(model: str, revision: str | None, on_progress: Callable[[str, int, int], None] | None) -> ModelFiles:
    """The files that hold the config; of a hub model, everything but its weights. An alias is one file with both."""
    if is_hub_id(model) and ":" not in model and not Path(model).exists():
        return fetch_without_weights(model, revision)
    return locate(model, revision=revision, on_progress=on_progress)


def _config(files: ModelFiles) -> dict[str, Any]:
    if files.kind == "gguf":
        return GgufCheckpoint(files).config
    return read_json(files.path / "config.json", required=True)
